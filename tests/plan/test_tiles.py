"""Tile classification against brute force: never wrong, and exact for affine masks."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attngen.language import load_text
from attngen.plan.tile_map import EMPTY, FULL, PARTIAL, classify_tiles
from attngen.plan.tiles import TileBounds, tile_bounds
from attngen.spec.attention import AttentionSpec, Input, Param
from attngen.spec.dtypes import FP16, INT32
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr, ExpressionError, Type, constant
from tests.expressions import booleans, divides_by_window

BLOCK_Q, BLOCK_KV = 8, 4


def brute_force(mask: Expr, names: dict, doc: np.ndarray, q_len: int, kv_len: int) -> np.ndarray:
    """EMPTY, PARTIAL or FULL of every tile by evaluating every pair; a tile that reaches past the last key is not full."""
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    allowed = evaluate(mask, {**names, "q": q, "k": k}, lambda _, at: doc[np.asarray(at[-1])], np)
    allowed = np.broadcast_to(allowed, (q_len, kv_len))
    kinds = np.empty((-(-q_len // BLOCK_Q), -(-kv_len // BLOCK_KV)), int)
    for i in range(kinds.shape[0]):
        for j in range(kinds.shape[1]):
            tile = allowed[i * BLOCK_Q : (i + 1) * BLOCK_Q, j * BLOCK_KV : (j + 1) * BLOCK_KV]
            whole = (j + 1) * BLOCK_KV <= kv_len
            kinds[i, j] = FULL if tile.all() and whole else PARTIAL if tile.any() else EMPTY
    return kinds


def bounds_of(mask: Expr) -> TileBounds:
    doc, window = Input("doc", INT32, ("kv_len",)), Param("window", Type.INT)
    return tile_bounds(AttentionSpec("t", FP16, 64, 64, constant(0.125), inputs=(doc,), params=(window,), mask=mask))


def classified(mask: Expr, names: dict, doc: np.ndarray) -> np.ndarray:
    return classify_tiles(bounds_of(mask), BLOCK_Q, BLOCK_KV, names, {"doc": doc})


def assert_never_wrong(mask: Expr, q_len: int, kv_len: int, window: int, doc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    names = {"q_len": q_len, "kv_len": kv_len, "window": window, "b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1}
    found, exact = classified(mask, names, doc), brute_force(mask, names, doc, q_len, kv_len)
    wrong = ((found == EMPTY) & (exact != EMPTY)) | ((found == FULL) & (exact != FULL))
    assert not wrong.any(), (mask, found, exact)
    return found, exact


@given(booleans(), st.integers(1, 40), st.integers(1, 30), st.integers(-5, 30), st.integers(1, 9))
def test_random_masks_are_never_called_full_or_empty_wrongly(mask: Expr, q_len, kv_len, window, run) -> None:
    assume(window != 0 or not divides_by_window(mask))
    doc = np.arange(64) // run
    with contextlib.suppress(ExpressionError):
        assert_never_wrong(mask, q_len, kv_len, window, doc)


@given(booleans(), st.integers(1, 20), st.integers(1, 30), st.integers(-5, 30), st.integers(1, 9))
def test_the_range_of_a_row_and_the_rest_of_the_mask_are_the_mask(mask: Expr, q_len, kv_len, window, run) -> None:
    assume(window != 0 or not divides_by_window(mask))
    names = {"q_len": q_len, "kv_len": kv_len, "window": window, "b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1}
    doc, k = np.arange(64) // run, np.arange(kv_len)
    try:
        bounds = bounds_of(mask)
    except ExpressionError:
        return
    if bounds.rest is None:
        return

    def read(name: str, at: tuple) -> np.ndarray:
        if name == "doc":
            return doc[np.asarray(at[-1])]
        reduce = np.min if name.endswith(".min") else np.max
        return reduce(doc[at[-1] * BLOCK_Q : (at[-1] + 1) * BLOCK_Q])

    for q in range(q_len):
        row = {**names, "q.lo": q, "q.hi": q, "q.tile": q // BLOCK_Q}
        begin, end = (evaluate(e, row, read, np) for e in (bounds.kv_begin, bounds.kv_end))
        pair = {**names, "q": q, "k": k}
        rest, allowed = (np.broadcast_to(evaluate(e, pair, read, np), kv_len) for e in (bounds.rest, mask))
        assert np.array_equal((k >= begin) & (k < end) & rest, allowed), (mask, bounds, q)


def test_what_a_row_s_range_says_is_not_asked_again() -> None:
    assert bounds_of(named_mask("causal and doc[q] == doc[k] and k > 3")).rest is named_mask("doc[q] == doc[k]")
    assert bounds_of(named_mask("causal or doc[q] == doc[k]")).rest is named_mask("causal or doc[q] == doc[k]")


@pytest.mark.parametrize(("several", "index"), [(1, "qk"), (2, "k")])
def test_tiles_of_whole_tiles_of_keys_are_ranged_once(several: int, index: str) -> None:
    """A vector that q and k index alike; one that only one of them indexes stays as it is, and so does the classification."""
    names = {"b": 0, "h": 0, "q_len": 60, "kv_len": 60, "window": 0}
    doc = np.sort(np.random.default_rng(0).integers(0, 6, 60)).astype(np.int32)
    flag = doc > 3
    for text, once in (
        ("doc[q] == doc[k]", [f"doc.{index}"]),
        ("causal and doc[q] == doc[k] and doc[k] > 1", [f"doc.{index}"]),
        ("doc[k] > 1", ["doc.k"]),
        ("flag[q] or flag[k]", [f"flag.{index}"]),
    ):
        bounds = bounds_of(named_mask(text))
        for size in (8, 16):
            joint = bounds.ranged_once(several * size, size)
            assert [s.name for s in joint.spans] == once
            kinds = (classify_tiles(b, several * size, size, names, {"doc": doc, "flag": flag}) for b in (bounds, joint))
            assert np.array_equal(*kinds), text


def test_tiles_of_parts_or_of_many_tiles_of_keys_are_ranged_by_themselves() -> None:
    bounds = bounds_of(named_mask("doc[q] == doc[k]"))
    for block_q, block_kv in ((8, 16), (24, 16), (64, 16)):
        assert bounds.ranged_once(block_q, block_kv) is bounds


NAMED = {
    "causal": "causal",
    "bottom right": "causal_bottom_right",
    "window": "causal and window(window)",
    "two-sided window": "abs(q - k) < window",
    "mirrored": "window >= abs(2 * k - q - 3)",
    "outside": "not (abs(q - k) >= window)",
    "hole": "abs(q - k) > window",
    "magnitudes": "abs(q - k) <= abs(window - k)",
    "prefix": "causal or prefix(window)",
    "documents": "causal and doc[q] == doc[k]",
    "dilated": "causal and (q - k) % 3 == 0",
    "dilated by a param": "causal and (q - k) % window == 0",
    "blocks by params": "(q // window - k // window) % 2 == 0",
    "affine": "2 * q - 3 * k >= window",
    "not": "not (q < k)",
    "band": "q - k < 9 and q - k >= 2",
}
AFFINE = ("causal", "bottom right", "window", "two-sided window", "outside", "affine", "not", "band")


def named_mask(text: str) -> Expr:
    declared = "param window: int  " if "window" in text.replace("window(", "") else ""
    declared += "input doc: int32[kv_len]  " if "doc" in text else ""
    declared += "input flag: bool[kv_len]  " if "flag" in text else ""
    (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 {declared} mask {text} }}")
    assert spec.mask is not None
    return spec.mask


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (8, 4), (33, 33), (20, 50), (50, 20), (64, 64)])
@pytest.mark.parametrize("window", [1, 2, 7, 30])
def test_named_masks(kind: str, q_len: int, kv_len: int, window: int) -> None:
    doc = np.arange(64) // 5
    found, exact = assert_never_wrong(named_mask(NAMED[kind]), q_len, kv_len, window, doc)
    if kind in AFFINE:
        assert np.array_equal(found, exact), (kind, found, exact)


def test_a_wrong_bound_would_be_noticed() -> None:
    """The comparison itself can fail: causal bounds held against a mask four keys narrower."""
    names = {"q_len": 32, "kv_len": 32, "window": 1, "b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1}
    found = classified(named_mask("causal"), names, np.arange(64))
    exact = brute_force(named_mask("q >= k + 4"), names, np.arange(64), 32, 32)
    assert (found != exact).any()


@pytest.mark.parametrize("by", ["8", "window"])
def test_blocks_of_a_strided_mask_are_told_apart(by: str) -> None:
    """Every tile of a mask of whole blocks is empty or full, whether a constant or a param says how long these are."""
    names = {"q_len": 64, "kv_len": 64, "window": 8, "b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1}
    mask = named_mask(f"(q // {by} - k // {by}) % 2 == 0")
    found, exact = classified(mask, names, np.arange(64)), brute_force(mask, names, np.arange(64), 64, 64)
    assert np.array_equal(found, exact)
    assert set(np.unique(found)) == {EMPTY, FULL}


@pytest.mark.parametrize(
    "mask", ["q // window > -3", "k // window - q // window < 2", "(k - q) % window < 2", "q % window == 0"]
)
@pytest.mark.parametrize("window", [-7, -2, 3, 9])
def test_divisors_of_both_signs(mask: str, window: int) -> None:
    assert_never_wrong(named_mask(mask), 40, 40, window, np.arange(64))


def test_closed_forms_bound_the_loop() -> None:
    """Causal at 4096: the tiles on and below the diagonal. Window 1024 at 65536: at most window / BLOCK_KV + 2 a row block."""
    names = {"b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1, "window": 1024}
    causal = tile_bounds(load_text("attention t { dtype fp16 head_dim 64 mask causal }")[0])
    kinds = classify_tiles(causal, 64, 64, {**names, "q_len": 4096, "kv_len": 4096})
    assert (kinds != EMPTY).sum() == 64 * 65 // 2
    assert (kinds == PARTIAL).sum() == 64
    (spec,) = load_text("attention t { dtype fp16 head_dim 64 param window: int mask causal and window(window) }")
    bounds = tile_bounds(spec)
    for low in range(0, 65536, 64):
        row = {**names, "q_len": 65536, "kv_len": 65536, "q.lo": low, "q.hi": low + 63}
        begin, end = (int(evaluate(e, row, lambda *_: 0, np)) for e in (bounds.kv_begin, bounds.kv_end))
        assert -(-end // 64) - begin // 64 <= 1024 // 64 + 2
