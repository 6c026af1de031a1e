"""Mask bounds against brute force, for keys of a block of rows and for rows of a block of keys: never wrong, and exact for
affine masks."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attngen.diagnostics import DiagnosticError
from attngen.language import load_text
from attngen.plan.axes import AXES
from attngen.plan.block_map import EMPTY, FULL, PARTIAL, classify_tiles
from attngen.plan.mask_bounds import MaskBounds, mask_bounds
from attngen.spec.attention import AttentionSpec, Input, Param
from attngen.spec.bounds import ranges
from attngen.spec.dtypes import FP16, INT32
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr, ExpressionError, Type, constant, names_in
from attngen.spec.ranges import element_ranges, name_ranges
from tests.expressions import booleans, divides_by_window
from tests.plan.brute_force import SOLVED, allowed_pairs, assert_never_wrong, kinds_of
from tests.random_draws import INPUTS, boolean

TILE = (8, 4)
ANY = {"b": 0, "h": 0, "batch": 1, "q_heads": 1, "kv_heads": 1}


def spec_of(mask: Expr) -> AttentionSpec:
    doc, window = Input("doc", INT32, ("kv_len",)), Param("window", Type.INT)
    return AttentionSpec("t", FP16, 64, 64, constant(0.125), inputs=(doc,), params=(window,), mask=mask)


def bounds_of(mask: Expr, tile: tuple[int, int] | None = None, solve: Any = "k") -> MaskBounds:
    return mask_bounds(spec_of(mask), tile, solve)


def checked(mask: Expr, q_len: int, kv_len: int, window: int, doc: np.ndarray, solve: str) -> tuple[np.ndarray, np.ndarray]:
    names = {**ANY, "q_len": q_len, "kv_len": kv_len, "window": window}
    allowed = allowed_pairs(mask, names, {"doc": doc})
    return assert_never_wrong(bounds_of(mask, solve=solve), allowed, TILE, names, {"doc": doc})


def assert_exact(found: np.ndarray, exact: np.ndarray) -> None:
    """A block without allowed pairs has an empty hull; one partial tile may remain, the one that contains begin and end."""
    nothing = (exact == EMPTY).all(1)
    assert np.array_equal(found[~nothing], exact[~nothing]), (found, exact)
    assert ((found[nothing] != EMPTY).sum(1) <= 1).all(), found


LENGTHS = st.integers(0, 2) | st.integers(0, 40)
WINDOWS = st.integers(-5, 30) | st.sampled_from((-(2**30), 2**30))


@given(booleans(), LENGTHS, LENGTHS, WINDOWS, st.integers(1, 9))
def test_random_masks_are_never_called_full_or_empty_wrongly(mask: Expr, q_len, kv_len, window, run) -> None:
    assume(window != 0 or not divides_by_window(mask))
    with contextlib.suppress(ExpressionError):
        for solve in SOLVED:
            checked(mask, q_len, kv_len, window, np.arange(64) // run, solve)


DECLARED = {
    **{name: f"param {name}: int" for name in ("w", "n")},
    **{name: f"input {name}: {what.format(dtype='fp16')}" for name, what in INPUTS.items()},
    "widths": "input widths: int32[heads]",
    "keep": "input keep: bool[heads, 60, 60]",
}
OF_HEADS = ("q - k < widths[h]", "abs(q - k) <= widths[h] // n", "k < q + w * widths[h // 2]", "keep[h, q // 8, k // 8]")
HUGE = {"int32": 2**31 - 1, "int64": 2**63 - 1}


def random_spec(r: random.Random) -> AttentionSpec:
    """A mask of `tests.random_draws`, or one of heads and tables too: with captured tensors and params."""
    mask = boolean(r, r.choice((0, 1, 2, 2)))
    if r.random() < 0.4:
        mask = f"{r.choice(OF_HEADS)} {r.choice(('and', 'or'))} {mask}"
    declared = " ".join(text for word, text in DECLARED.items() if re.search(rf"\b{word}\b", mask))
    heads = r.choice(("", "heads 4 over 2"))
    (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 {heads} {declared} mask {mask} }}")
    return spec


def random_inputs(spec: AttentionSpec, sizes: dict[str, int], r: random.Random) -> dict[str, np.ndarray]:
    """Runs of equal elements; integers past the last key and before the first one too, and as large as their type has them."""
    rng = np.random.default_rng(r.randrange(2**32))
    extreme, found = r.random() < 0.2, {}
    for declared in spec.inputs:
        shape = tuple(d if isinstance(d, int) else sizes.get(d, sizes["q_heads"]) for d in declared.dims)
        if declared.dtype.kind == "bool":
            values = rng.random(shape) < r.choice((0.1, 0.5, 0.95))
        elif extreme:
            values = rng.choice([-HUGE[declared.dtype.name] - 1, -1, 0, 7, HUGE[declared.dtype.name]], shape)
        else:
            values = rng.integers(-3, sizes["kv_len"] + 20, shape) if r.random() < 0.5 else np.sort(rng.integers(0, 4, shape))
        found[declared.name] = values.astype(declared.dtype.numpy)
    return found


@pytest.mark.long
@given(st.randoms(use_true_random=False))
def test_random_specs_are_never_classified_wrongly(r: random.Random) -> None:
    try:
        spec = random_spec(r)
    except DiagnosticError:
        assume(False)
    assert spec.mask is not None
    q_len, kv_len = (r.choice((0, 1, 2, 5, 16, 33, 50)) for _ in range(2))
    if {"doc", "key_ok"} & {i.name for i in spec.inputs}:  # read at rows and keys alike
        kv_len = max(q_len, kv_len)
    names = {**ANY, "b": r.randrange(2), "h": r.randrange(4), "batch": 2, "q_heads": 4, "kv_heads": 2}
    names |= {"q_len": q_len, "kv_len": kv_len}
    names |= {"w": r.choice((0, 1, 9, 30, -4, 2**30, -(2**30))), "n": r.choice((1, 2, 3, 7, 16, -1, -5, 2**30, -(2**30)))}
    inputs = random_inputs(spec, names, r)
    tile = r.choice(((8, 4), (8, 8), (16, 8), (8, 16), (4, 12), (64, 64)))
    allowed = allowed_pairs(spec.mask, names, inputs)
    for solve in SOLVED:
        for bounds in (mask_bounds(spec, None, solve), mask_bounds(spec, tile, solve)):
            assert_never_wrong(bounds, allowed, tile, names, inputs)
            block = bounds.axis.other
            if block.tile.name not in names_in(bounds.begin, bounds.end, bounds.may, bounds.must):
                # The first block may lack indices, if no span is of whole blocks
                missing = -names[block.length.name] % tile["qk".index(block.index)]
                assert_never_wrong(bounds, allowed, tile, names, inputs, missing)


COEFFICIENTS = st.integers(-3, 3)


@given(
    COEFFICIENTS, COEFFICIENTS, st.integers(-60, 60), st.sampled_from(("<", "<=", ">", ">=")), st.booleans(),
    st.integers(1, 40), st.integers(1, 40),
)  # fmt: skip
def test_an_affine_comparison_has_tight_bounds(
    of_q: int, of_k: int, offset: int, op: str, negated: bool, q_len, kv_len
) -> None:
    """Tiles are exact, the hull begins and ends with an allowed pair, and the full range ends where a pair is forbidden."""
    text = f"{of_q} * q + {of_k} * k {op} {offset}"
    mask = named_mask(f"not ({text})" if negated else text)
    names = {**ANY, "q_len": q_len, "kv_len": kv_len}
    allowed = allowed_pairs(mask, names, {})
    for solve in SOLVED:
        bounds = bounds_of(mask, solve=solve)
        assert_exact(*assert_never_wrong(bounds, allowed, TILE, names))
        axis, block = bounds.axis, bounds.axis.other
        pairs = allowed if solve == "k" else allowed.T
        for lo in range(0, pairs.shape[0], 8):
            rows = pairs[lo : lo + 8]
            at = {**names, block.lo.name: lo, block.hi.name: lo + len(rows) - 1}
            begin, end, full_begin, full_end = (
                evaluate(e, at, lambda *_: 0, np) for e in (bounds.begin, bounds.end, bounds.full_begin, bounds.full_end)
            )
            for some, first, last in ((rows.any(0), begin, end), (rows.all(0), full_begin, full_end)):
                assert first >= 0
                assert last <= names[axis.length.name]
                assert list(range(first, last)) == list(np.flatnonzero(some))


@given(booleans(), st.integers(1, 20), st.integers(1, 30), WINDOWS, st.integers(1, 9), st.sampled_from(SOLVED))
def test_the_range_of_a_row_and_the_residual_mask_are_the_mask(mask: Expr, q_len, kv_len, window, run, solve) -> None:
    """The range of a key and its residual mask give the mask of every pair, too."""
    assume(window != 0 or not divides_by_window(mask))
    names, doc = {**ANY, "q_len": q_len, "kv_len": kv_len, "window": window}, np.arange(64) // run
    try:
        bounds = bounds_of(mask, solve=solve)
    except ExpressionError:
        return
    axis, block = bounds.axis, bounds.axis.other
    length = {block.index: TILE[0], axis.index: TILE[1]}

    def read(name: str, at: tuple) -> np.ndarray:
        if name == "doc":
            return doc[np.asarray(at[-1])]
        _, index, end = name.split(".")
        tile = doc[at[-1] * length[index] : (at[-1] + 1) * length[index]]
        return {"min": np.min, "max": np.max}[end](tile)

    indices = np.arange(names[axis.length.name])
    for one in range(names[block.length.name]):
        single = {**names, block.lo.name: one, block.hi.name: one, block.tile.name: one // length[block.index]}
        begin, end = (evaluate(e, single, read, np) for e in (bounds.begin, bounds.end))
        pairs = {**names, block.index: one, axis.index: indices}
        residual, allowed = (np.broadcast_to(evaluate(e, pairs, read, np), indices.shape) for e in (bounds.residual, mask))
        assert np.array_equal((indices >= begin) & (indices < end) & residual, allowed), (mask, bounds, one)


def test_what_a_row_s_range_implies_is_not_in_the_residual_mask() -> None:
    assert bounds_of(named_mask("causal and doc[q] == doc[k] and k > 3")).residual is named_mask("doc[q] == doc[k]")
    assert bounds_of(named_mask("causal or doc[q] == doc[k]")).residual is named_mask("causal or doc[q] == doc[k]")
    assert bounds_of(named_mask("causal and window(window)")).exact
    assert bounds_of(named_mask("causal and window(window)"), solve="q").exact


@pytest.mark.parametrize("solve", SOLVED)
@pytest.mark.parametrize(("several", "shared"), [(1, "qk"), (2, "solved")])
def test_blocks_of_whole_tiles_share_their_spans(several: int, shared: str, solve: str) -> None:
    """A vector that q and k index alike; one that only one of them indexes stays as it is, and so does the classification."""
    names = {**ANY, "q_len": 60, "kv_len": 60, "window": 0}
    doc = np.sort(np.random.default_rng(0).integers(0, 6, 60)).astype(np.int32)
    inputs = {"doc": doc, "flag": doc > 3}
    index = solve if shared == "solved" else shared
    for text, expected in (
        ("doc[q] == doc[k]", [f"doc.{index}"]),
        ("causal and doc[q] == doc[k] and doc[k] > 1", [f"doc.{index}"]),
        ("flag[q] or flag[k]", [f"flag.{index}"]),
        (f"causal and doc[{AXES[solve].index}] > 1", [f"doc.{solve}"]),
    ):
        bounds = bounds_of(named_mask(text), solve=solve)
        for size in (8, 16):
            tile = (several * size, size) if solve == "k" else (size, several * size)
            joint = bounds_of(named_mask(text), tile, solve)
            assert [s.name for s in joint.spans] == expected
            kinds = (classify_tiles(b, *tile, names, inputs) for b in (bounds, joint))
            assert np.array_equal(*kinds), text


def test_blocks_of_parts_or_of_many_tiles_have_spans_of_their_own() -> None:
    bounds = bounds_of(named_mask("doc[q] == doc[k]"))
    for block_q, block_kv in ((8, 16), (24, 16), (64, 16)):
        assert bounds_of(named_mask("doc[q] == doc[k]"), (block_q, block_kv)) is bounds


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
def test_named_masks(kind: str, q_len: int, kv_len: int) -> None:
    mask, doc = named_mask(NAMED[kind]), np.arange(64) // 5
    for solve in SOLVED:
        for window in (1, 2, 7, 30):
            found, exact = checked(mask, q_len, kv_len, window, doc, solve)
            if kind in AFFINE:
                assert_exact(found, exact)


def test_rows_of_a_block_of_keys() -> None:
    """The bounds for rows, as text."""
    causal, window = (bounds_of(named_mask(NAMED[kind]), solve="q") for kind in ("causal", "window"))
    assert (repr(causal.begin), repr(causal.end)) == ("k.lo", "q_len")
    assert (repr(causal.full_begin), repr(causal.full_end)) == ("k.hi", "q_len")
    names = {**ANY, "q_len": 100, "kv_len": 100, "window": 20, "k.lo": 32, "k.hi": 39}
    ends = (window.begin, window.end, window.full_begin, window.full_end)
    assert [evaluate(e, names, lambda *_: 0, np) for e in ends if e is not None] == [32, 59, 39, 52]


def test_a_mask_of_heads_and_batches_alone_visits_all_or_nothing() -> None:
    """A block of keys beyond the length of its batch is skipped."""
    (spec,) = load_text("attention t { dtype fp16 head_dim 64 input ends: int32[batch] mask k < ends[b] and h != 2 }")
    names = {**ANY, "q_len": 20, "kv_len": 16}
    bounds, ends = mask_bounds(spec, None, "q"), {"ends": np.array([9], np.int32)}
    kinds = classify_tiles(bounds, 8, 4, names, ends)
    assert np.array_equal(kinds, [[FULL, FULL, PARTIAL], [FULL, FULL, PARTIAL], [PARTIAL] * 3, [EMPTY] * 3])
    assert (classify_tiles(bounds, 8, 4, {**names, "h": 2}, ends) == EMPTY).all()


def test_elements_as_large_as_their_type_are_added_exactly() -> None:
    (spec,) = load_text("attention t { dtype fp16 head_dim 64 param w: int input far: int32[q_len] mask k <= far[q] + w }")
    names, far = {**ANY, "q_len": 8, "kv_len": 8, "w": 9}, {"far": np.full(8, 2**31 - 1, np.int32)}
    assert (classify_tiles(mask_bounds(spec), 4, 4, names, far) == FULL).all()


@pytest.mark.parametrize(
    "mask",
    [
        "abs(x[k]) >= 0.0", "x[k] <= t", "t >= x[q]", "-inf <= x[k]", "not (x[k] > t)", "abs(t) >= 0.0", "-abs(x[k]) <= 0.0",
        "where(k > 9, t, 1.0) <= 1.0", "where(q > 9, t, 1.0) < 2.0", "where(k > q, x[k], 3.0) <= inf", "abs(x[k // 8]) >= 0.0",
        "abs(float(q) * t) >= 0.0", "where(k > 9, x[q], 1.0) != 1.0", "min(abs(x[k]), 1.0) >= 0.0",
    ],
)  # fmt: skip
def test_no_comparison_with_nan_is_certain(mask: str) -> None:
    """An interval from -inf to inf contains no NaN."""
    declared = " ".join(text for word, text in (("x[", "input x: fp32[60]"), ("t", "param t: float")) if word in mask)
    (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 {declared} mask {mask} }}")
    assert spec.mask is not None
    x = np.linspace(-1.0, 3.0, 60, dtype=np.float32)
    x[[1, 7, 8, 33]], x[20:30], x[40] = np.nan, 3.0, np.inf
    for t in (np.nan, np.inf, -np.inf, 1.0):
        names = {**ANY, "q_len": 50, "kv_len": 60, "t": t}
        with np.errstate(invalid="ignore"):
            allowed = allowed_pairs(spec.mask, names, {"x": x})
            for solve, tile in itertools.product(SOLVED, (None, TILE)):
                assert_never_wrong(mask_bounds(spec, tile, solve), allowed, TILE, names, {"x": x})


def test_bounds_of_a_condition_of_rows_that_might_not_fit_64_bits_are_not_made() -> None:
    """The bound of a `bit_and` of any sign is -2^63: a sum with it does not fit, although the value does."""
    (spec,) = load_text(
        "attention t { dtype fp16 head_dim 64 param n: int input r: int32[60] mask bit_and(r[q], n) + 4 * n <= 0 and k > 3 }"
    )
    assert spec.mask is not None
    inputs = {"r": (np.arange(60, dtype=np.int32) - 30) * 37}
    for n in (-7, 5, 1000):
        names = {**ANY, "q_len": 40, "kv_len": 40, "n": n}
        for solve in SOLVED:
            assert_never_wrong(mask_bounds(spec, None, solve), allowed_pairs(spec.mask, names, inputs), TILE, names, inputs)


def test_a_normal_form_that_might_not_fit_64_bits_is_not_made() -> None:
    """`max(x, 0) < max(y, 0) - 3` fits; with 3 on the other side it does not."""
    declared = "input x: int64[kv_len] input y: int64[q_len]"
    mask = "causal and max(x[k], 0) < max(y[q], 0) - 3"
    (spec,) = load_text(f"attention t {{ dtype fp16 head_dim 64 {declared} mask {mask} }}")
    assert spec.mask is not None
    names, rng = {**ANY, "q_len": 40, "kv_len": 40}, np.random.default_rng(0)
    inputs = {n: rng.choice([-(2**63), -1, 0, 4, 2**63 - 1], 40) for n in "xy"}
    for solve in SOLVED:
        bounds = mask_bounds(spec, None, solve)
        assert_never_wrong(bounds, allowed_pairs(spec.mask, names, inputs), TILE, names, inputs)
        assert ranges(bounds.residual, name_ranges(spec), element_ranges(spec))


def test_a_wrong_bound_would_be_noticed() -> None:
    """The comparison itself can fail: causal bounds held against a mask four keys narrower."""
    names = {**ANY, "q_len": 32, "kv_len": 32}
    for solve in SOLVED:
        found = classify_tiles(bounds_of(named_mask("causal"), solve=solve), *TILE, names)
        exact = kinds_of(allowed_pairs(named_mask("q >= k + 4"), names, {}), *TILE, solve)
        assert (found != exact).any()


@pytest.mark.parametrize("by", ["8", "window"])
def test_blocks_of_a_strided_mask_are_told_apart(by: str) -> None:
    """Every tile of a mask of whole blocks is empty or full, whether a constant or a param says how long these are."""
    for solve in SOLVED:
        found, exact = checked(named_mask(f"(q // {by} - k // {by}) % 2 == 0"), 64, 64, 8, np.arange(64), solve)
        assert np.array_equal(found, exact)
        assert set(np.unique(found)) == {EMPTY, FULL}


@pytest.mark.parametrize(
    "mask", ["q // window > -3", "k // window - q // window < 2", "(k - q) % window < 2", "q % window == 0"]
)
@pytest.mark.parametrize("window", [-7, -2, 3, 9])
def test_divisors_of_both_signs(mask: str, window: int) -> None:
    for solve in SOLVED:
        checked(named_mask(mask), 40, 40, window, np.arange(64), solve)


def test_closed_forms_bound_the_loop() -> None:
    """Causal at 4096: the tiles on and below the diagonal. Window 1024 at 65536: at most window / 64 + 2 tiles a block."""
    names = {**ANY, "window": 1024}
    for solve in SOLVED:
        kinds = classify_tiles(bounds_of(named_mask("causal"), solve=solve), 64, 64, {**names, "q_len": 4096, "kv_len": 4096})
        assert (kinds != EMPTY).sum() == 64 * 65 // 2
        assert (kinds == PARTIAL).sum() == 64
        bounds = bounds_of(named_mask("causal and window(window)"), solve=solve)
        block = bounds.axis.other
        for low in range(0, 65536, 64):
            at = {**names, "q_len": 65536, "kv_len": 65536, block.lo.name: low, block.hi.name: low + 63}
            begin, end = (int(evaluate(e, at, lambda *_: 0, np)) for e in (bounds.begin, bounds.end))
            assert -(-end // 64) - begin // 64 <= 1024 // 64 + 2


@pytest.mark.parametrize("solve", ["q", "k"])
def test_ranges_lie_within_the_lengths(solve: str) -> None:
    """Also of blocks that see nothing: a negative end would be a tile before the first."""
    names = {**ANY, "window": 5}
    masks = ("q + k <= 10", "k <= q - 20", "k >= q + 20", "(k > 90 or k < 2) and q + k <= 10", "k <= q + kv_len - q_len")
    empty = 0
    for text in masks:
        (spec,) = load_text(f"attention one {{ dtype fp16 head_dim 16 mask {text} }}")
        bounds = mask_bounds(spec, solve=solve)
        ends = [e for e in (bounds.begin, bounds.end, bounds.full_begin, bounds.full_end) if e is not None]
        for q_len, kv_len in itertools.product((1, 7, 40, 64), repeat=2):
            block = bounds.axis.other
            length, seen = (q_len, kv_len) if solve == "k" else (kv_len, q_len)
            first = np.arange(0, length, 4)
            last = np.minimum(first + 4, length) - 1
            at = {**names, "q_len": q_len, "kv_len": kv_len, block.lo.name: first, block.hi.name: last}
            begin, end, *full = (np.broadcast_to(evaluate(e, at, None, np), first.shape) for e in ends)
            assert (begin >= 0).all()
            assert ((end >= 0) & (end <= seen)).all(), (text, q_len, kv_len)
            assert all((e >= 0).all() for e in full)
            empty += int((begin >= end).sum())
    assert empty > 50
