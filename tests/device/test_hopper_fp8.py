"""The Hopper schedule of products of 8 bits: Q, K and V of e4m3, and weights too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES
from attngen.plan.plan import PlanRefusal
from attngen.reference.compare import compare
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.problems import Shape, sample
from attngen.reference.stored import of_lengths, of_sequences
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP8_E4M3, from_storage, nans, round_to_storage
from tests import tiers
from tests.harness import call, call_stored, compared, compiled, run, truth_for
from tests.random_draws import Case
from tests.random_lengths import Call
from tests.random_problems import arrays_of

BYTES = {"q": "fp8_e4m3", "k": "fp8_e4m3", "v": "fp8_e4m3", "o": "bf16"}
SCALES = {
    "inputs": {"ks": ("fp32", ("batch", "kv_heads")), "vs": ("fp32", ("batch", "kv_heads"))},
    "k_scale": "ks[b, h // (heads // kv_heads)]",
    "v_scale": "vs[b, h // (heads // kv_heads)]",
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal", "lse": True},
    "heads of 128": {"head_dim": 128, "head_dim_v": 128, "mask": "causal_bottom_right"},
    "heads of 256": {"head_dim": 256, "head_dim_v": 256, "mask": "causal"},
    "soft-capped heads of 256": {"head_dim": 256, "head_dim_v": 256, "score": "softcap(5.0)", "lse": True},
    "heads of 192 under a window": {"head_dim": 192, "head_dim_v": 192, "mask": "causal and window(70)"},
    "heads of 112 and 48": {"head_dim": 112, "head_dim_v": 48, "dtype": BYTES | {"o": "fp16"}, "lse": True},
    "scales": SCALES | {"mask": "causal"},
    "a scale of the call": {"params": {"size": ("float", 0.3)}, "scale": "size", "lse": True},
    "window": {"mask": "causal and window(70)"},
    "documents": {"inputs": {"ids": ("int32", ("batch", "places"))}, "mask": "same_document(ids)", "lse": True},
    "softcap": {"score": "softcap(5.0)", "mask": "causal"},
    "alibi": {"inputs": {"z": ("fp32", ("heads",))}, "score": "alibi(z)", "mask": "causal"},
    "bias and sink": {
        "inputs": {"bias": ("bf16", ("heads", "q_len", "kv_len")), "z": ("fp32", ("heads",))},
        "score": "s + bias[h, q, k]",
        "sink": "z[h]",
        "lse": True,
    },
    "keys' bias": {"inputs": {"bias": ("fp32", ("batch", "kv_len"))}, "score": "s + bias[b, k]"},
    "classified": {"mask": "(q - k) % 3 != 0 or q == k"},
}
SHAPES = ((133, 300), (3, 5), (300, 129), (1, 128))


def of_bytes(form: str = "plain", **more: Any) -> AttentionSpec:
    return attngen.define(**({"dtype": BYTES, "head_dim": 64, "head_dim_v": 64} | FORMS[form] | more))


@pytest.mark.quick
@pytest.mark.parametrize("form", tiers.cases([*FORMS], quick=["scales"]))
def test_against_the_oracle(form: str) -> None:
    """Lengths around tiles, grouped heads."""
    spec = of_bytes(form)
    for q_len, kv_len in SHAPES:
        found = run(spec, "hopper", with_free_sizes(spec, Shape(2, 4, 2, q_len, kv_len), {"places": 300}), arch="sm_90a")
        assert found.passed, (q_len, kv_len, found)


@pytest.mark.parametrize("size", tiers.cases([16, 64, 128], quick=[]))
def test_every_number_is_read_as_it_is(size: int) -> None:
    """As a value of the only key that a row sees, and as an element of the only key beside a query of zeros and a one."""
    spec = of_bytes(head_dim=size, head_dim_v=size, scale=1.0, lse=True, dtype=BYTES | {"o": "fp16"})
    kernel = compiled(spec, "hopper", "sm_90a")
    one = np.ones((1, 1, 1, size), np.float32)
    each = np.eye(size, dtype=np.float32)[None, None]
    for first in range(0, 256, size):
        codes = (first + np.arange(size)).astype(np.uint8).view(FP8_E4M3.numpy).reshape(1, 1, 1, size)
        values = from_storage(codes)
        found, _ = kernel(*(round_to_storage(one, FP8_E4M3) for _ in "qk"), codes)
        assert np.array_equal(from_storage(found), values, equal_nan=True)
        finite = np.where(np.isfinite(values), values, 0.0)
        _, lse = kernel(round_to_storage(each, FP8_E4M3), round_to_storage(finite, FP8_E4M3), round_to_storage(one, FP8_E4M3))
        assert np.allclose(lse[0, 0], finite[0, 0, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", tiers.cases(["packed", "padded"], quick=["packed"]))
def test_sequences_whose_unused_rows_are_nan(storage: str) -> None:
    """The bits of NaN lie behind the last key of each sequence; sequences begin at any row."""
    spec = of_bytes(storage=storage, mask="causal_bottom_right", lse=True)
    one = Case("", "hopper", "sm_90a", (), False, 1.0, storage=storage)  # type: ignore[arg-type]
    rows = (140, 0, 7, 133, 1) if storage == "packed" else 5 * (140,)
    lengths = Call(Shape(5, 4, 2, 140, 260), rows, (260, 3, 0, 128, 129), {})
    problem = sample(spec, lengths.shape)
    arrays = arrays_of(one, lengths, spec, problem, 0)
    kernel = compiled(spec, "hopper", "sm_90a")
    found = call_stored(kernel, arrays)
    for b, (output, lse) in enumerate(of_sequences(spec, lengths.rows, *found)):
        expected = truth_for(kernel, of_lengths(spec, problem, *lengths.lengths[b])).of_batch(b)
        one_sequence = compare(output, lse, expected)
        assert one_sequence.passed, (b, one_sequence)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_stays_nan(code: int) -> None:
    """Of a key in the rows that see it, and no others; of a value in its column, which rows that share its tile have too."""
    kernel = compiled(of_bytes(mask="k <= q or q >= 140", head_dim=16, head_dim_v=16), "hopper", "sm_90a")
    ones = {t: round_to_storage(np.ones((1, 1, n, 16), np.float32), FP8_E4M3) for t, n in (("q", 150), ("k", 150), ("v", 150))}
    for tensor, columns in (("k", slice(None)), ("v", slice(5, 6))):
        arrays = {name: array.copy() for name, array in ones.items()}
        arrays[tensor].view(np.uint8)[0, 0, 140, 5] = code
        found = np.isnan(from_storage(kernel(**arrays)))
        assert found[0, 0, 140:, columns].all(), tensor
        others = found[0, 0, :128] if tensor == "k" else np.delete(found, 5, -1)
        assert not others.any(), tensor


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_scales_of_any_size(scale: float) -> None:
    spec = of_bytes(params={"x": ("float", 1.0), "y": ("float", 1.0)}, k_scale="x", v_scale="y", head_dim=16, head_dim_v=16)
    kernel, problem = compiled(spec, "hopper", "sm_90a"), sample(spec, Shape(1, 2, 2, 70, 200))
    for params in ({"x": scale, "y": 1.0}, {"x": 1.0, "y": scale}):
        found = compared(kernel, problem, **params)
        assert found.passed, (params, found)


def test_rows_of_k_and_v_in_turn() -> None:
    """One array has a key and a value of each head, then those of the next one, then NaN; Q is a part of wider rows."""
    spec = of_bytes("scales")
    kernel, problem = compiled(spec, "hopper", "sm_90a"), sample(spec, Shape(2, 4, 2, 133, 150))
    both, rows = nans((2, 160, 2, 3, 64), FP8_E4M3.numpy), nans((2, 133, 4, 96), FP8_E4M3.numpy)
    for i, array in enumerate((problem.k, problem.v)):
        both[:, :150, :, i] = array.swapaxes(1, 2)
    k, v = (both[:, :150, :, i].swapaxes(1, 2) for i in range(2))
    rows[..., 16:80] = problem.q.swapaxes(1, 2)
    views = replace(problem, q=rows[..., 16:80].swapaxes(1, 2), k=k, v=v)
    assert np.array_equal(*(from_storage(call(kernel, one)[0]) for one in (problem, views)))


def test_scales_of_heads_that_are_nothing_or_huge() -> None:
    spec = of_bytes("scales")
    kernel, problem = compiled(spec, "hopper", "sm_90a"), sample(spec, Shape(2, 4, 2, 133, 150))
    for of_k, of_v in (((0.0, 1e30), (1e30, 0.0)), ((-2.0, 1e-30), (-1e36, 1e-30))):
        scales = {"ks": np.float32([of_k, of_k[::-1]]), "vs": np.float32([of_v, of_v])}
        found = compared(kernel, replace(problem, inputs=scales))
        assert found.passed, (of_k, of_v, found)


def test_a_maximum_that_rises_with_every_tile() -> None:
    """Scores grow with the key, so that each tile rescales what was summed, and lose nothing of lse."""
    spec = of_bytes(params={"slope": ("float", 0.05)}, score="s + slope * k", lse=True)
    kernel, problem = compiled(spec, "hopper", "sm_90a"), sample(spec, Shape(1, 2, 1, 65, 700))
    for slope in (0.05, -0.05, 3.0):
        found = compared(kernel, problem, slope=slope)
        assert found.passed, (slope, found)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": BYTES | {"v": "fp8_e5m2"}}, "products are of e4m3 alone"),
        ({"dtype": BYTES | {"k": "bf16"}}, "products are of e4m3 alone"),
        ({"dtype": BYTES | {"o": "fp32"}}, "O is bf16 or fp16"),
        ({"head_dim": 72}, "multiples of 16"),
        ({"head_dim": 320, "head_dim_v": 320}, "at most 256 elements"),
        ({"normalize": "sigmoid"}, "numbers of e4m3"),
        ({"v_scale": "1.0 + k"}, "exceed the range of e4m3"),
        ({"dropout": 0.1}, "are not dropped"),
        ({"inputs": dict.fromkeys(("c1", "s1"), ("fp32", ("rows", 16))), "rotary": "32 halves by c1, s1"}, "not rotated"),
        ({"storage": "paged", "page_size": 16}, "lie in no pages"),
    ],
)
def test_what_it_lacks_is_refused(settings: dict[str, Any], says: str) -> None:
    spec = of_bytes(**settings)
    with pytest.raises(PlanRefusal, match=f"(?s){says}.*one of: naive, tiled"):
        choose(spec, ARCHES["sm_90a"], "hopper")
    assert choose(spec, ARCHES["sm_90a"]).keyword == "tiled"


def test_auto_takes_it_where_the_instruction_is() -> None:
    for size in (64, 128, 256):
        plan = choose(of_bytes(head_dim=size, head_dim_v=size), ARCHES["sm_90a"])
        assert plan.schedule.name == "hopper_fp8"
    assert choose(of_bytes(), ARCHES["sm_80"]).keyword == "tiled"
    assert choose(of_bytes(storage="packed"), ARCHES["sm_90a"]).keyword == "hopper"
    with pytest.raises(PlanRefusal, match="it needs TMA and wgmma"):
        choose(of_bytes(), ARCHES["sm_80"], "hopper")
