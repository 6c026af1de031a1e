"""Scores of any size: additive masks of finfo.min, scores and sinks up to the ends of float's range, values far from 1.

Scores are exact here (elements of Q and K are whole numbers, or 0), so that float64 and a kernel agree on which are equal.
"""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.reference.problems import Sample, Shape, sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import call, compiled, run

Q_LEN, KV_LEN = 65, 300  # the last tile of rows and the last of keys are partial
SHAPE = Shape(1, 1, 1, Q_LEN, KV_LEN)
FLT_MAX = float(np.finfo(np.float32).max)
BF16_MIN, FP16_MIN = -3.3895313892515355e38, -65504.0
ON_TENSOR_CORES = [("fused", "sm_80"), ("decode", "sm_80"), ("wgmma", "sm_90a"), ("hopper", "sm_90a")]
SCHEDULES = [("naive", "sm_80"), ("tiled", "sm_80"), ("fused", "sm_75"), *ON_TENSOR_CORES]
BIASED = {"score": "s + bias[q, k]", "inputs": {"bias": ("fp32", ("q_len", "kv_len"))}}


def whole_numbers(spec: AttentionSpec, seed: int = 0) -> Sample:
    """Q and K of -1, 0 and 1, and few that are not 0: with scale 1, scores between -4 and 4."""
    problem, rng = sample(spec, SHAPE), np.random.default_rng(seed)
    q, k = (np.zeros(x.shape, np.float32) for x in (problem.q, problem.k))
    q[..., :4], k[..., :4] = (rng.integers(-1, 2, (*x.shape[:3], 4)) for x in (q, k))
    return Sample(round_to_storage(q, spec.dtype), round_to_storage(k, spec.dtype), problem.v, problem.inputs)


def biases(low: float) -> dict[str, np.ndarray]:
    """Additive masks whose forbidden pairs are `low`."""
    q, k = np.ogrid[:Q_LEN, :KV_LEN]
    causal, few = k <= q, (q * 7 + k * 3) % 41 == 0
    rows = np.where((q % 3 == 0) | few, low, 0.0)  # every third row has no pair that is not low
    rising = np.linspace(low, low / 2, KV_LEN) + 0 * q
    return {
        "causal": np.where(causal, 0.0, low),
        "few keys": np.where(few, 0.0, low),
        "whole rows": rows,
        "all": np.full((Q_LEN, KV_LEN), low),
        "beside -inf": np.where(few, -np.inf, np.where(causal, 0.0, low)),
        "rows of -inf beside rows of low": np.where(q % 2 == 0, -np.inf, low) + 0 * k,
        "rising": rising,
        "falling": rising[:, ::-1],
    }


IN_TERMS = ("hopper", "sm_90a", "fp32")
EVERY_DTYPE = [*((*s, "bf16") for s in SCHEDULES), *((*s, "fp16") for s in ON_TENSOR_CORES), IN_TERMS]
QUICK = [("fused", "sm_80"), ("hopper", "sm_90a")]
LOW = [-1e4, FP16_MIN, -(2.0**17), -1e9, -(2.0**40), -1e30, BF16_MIN, -FLT_MAX]


@pytest.mark.parametrize(
    ("kernel", "arch", "dtype"), tiers.cases(EVERY_DTYPE, quick=lambda *s: s[:2] in QUICK and s[2] == "bf16")
)
@pytest.mark.parametrize("low", tiers.cases(LOW, quick=[BF16_MIN], one_of=6))
def test_additive_masks_of_large_negative_numbers(low: float, kernel: str, arch: str, dtype: str) -> None:
    spec = attngen.define(dtype=dtype, head_dim=64, scale=1.0, lse=True, **BIASED)
    problem = whole_numbers(spec)
    for name, bias in biases(low).items():
        problem.inputs["bias"] = bias.astype(np.float32)
        assert run(spec, kernel, problem, arch=arch).passed, name


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "arch"), ON_TENSOR_CORES)
@pytest.mark.parametrize("more", [{"mask": "causal_bottom_right"}, {"head_dim": 256}])
def test_additive_masks_of_other_plans(kernel: str, arch: str, more: dict[str, object]) -> None:
    spec = attngen.define(**{"dtype": "bf16", "head_dim": 64, "scale": 1.0, **BIASED, **more})
    problem = whole_numbers(spec)
    for low in (FP16_MIN, BF16_MIN, -FLT_MAX):
        for name, bias in biases(low).items():
            problem.inputs["bias"] = bias.astype(np.float32)
            assert run(spec, kernel, problem, arch=arch).passed, (low, name)


FACTORS = ((1.0, 0.0), (1e5, 0.0), (1e9, -1e9), (1e20, 1e22), (8e37, 0.0), (-8e37, 0.0), (1.0, -3e38), (1.0, 3e38))


SIZED = [
    *((*s, "bf16", "s * factor + shift") for s in SCHEDULES),
    *((*s, e) for s in (*((*t, "bf16") for t in ON_TENSOR_CORES), IN_TERMS) for e in ("s - 3e38", "1e37 * s")),
    (*IN_TERMS, "s * factor + shift"),
]
QUICK_SIZED = [(*s, "bf16", "s * factor + shift") for s in QUICK]


@pytest.mark.parametrize(("kernel", "arch", "dtype", "score"), tiers.cases(SIZED, quick=QUICK_SIZED))
def test_scores_of_any_size(kernel: str, arch: str, dtype: str, score: str) -> None:
    params = {n: ("float", 1.0) for n in ("factor", "shift") if n in score}
    spec = attngen.define(dtype=dtype, head_dim=64, scale=1.0, score=score, params=params)
    problem = whole_numbers(spec)
    for factor, shift in FACTORS if params else FACTORS[:1]:
        values = {"factor": factor, "shift": shift}
        assert run(spec, kernel, problem, arch=arch, **{n: values[n] for n in params}).passed, values


MASKED = [*((*s, None) for s in SCHEDULES), ("hopper", "sm_90a", "causal")]


@pytest.mark.parametrize(("kernel", "arch", "mask"), tiers.cases(MASKED, quick=MASKED[-1:]))
def test_scores_of_large_queries_and_keys(kernel: str, arch: str, mask: str | None) -> None:
    """Plain attention, whose scale joins the exponent's factor."""
    spec = attngen.define(dtype="bf16", head_dim=64, mask=mask)
    problem = whole_numbers(spec)
    for size in (2.0**10, 2.0**20, 2.0**60):
        q, k = (round_to_storage(np.float32(size) * from_storage(x), spec.dtype) for x in (problem.q, problem.k))
        assert run(spec, kernel, Sample(q, k, problem.v, {}), arch=arch).passed, size


WITH_LSE = [*((*s, True) for s in SCHEDULES), *((*s, False) for s in ON_TENSOR_CORES)]


@pytest.mark.parametrize(("kernel", "arch", "lse"), tiers.cases(WITH_LSE, quick=WITH_LSE[-1:]))
def test_sinks_of_any_size(kernel: str, arch: str, lse: bool) -> None:
    spec = attngen.define(
        dtype="bf16", head_dim=64, scale=0.125, sink="sinks[h]", inputs={"sinks": ("fp32", ("heads",))}, lse=lse
    )
    problem = whole_numbers(spec)
    for sink in (-np.inf, -FLT_MAX, -1e37, -1e9, 0.0, 1e9, 1e37, *([] if lse else [1e38, FLT_MAX])):
        problem.inputs["sinks"] = np.array([sink], np.float32)
        assert run(spec, kernel, problem, arch=arch).passed, sink
    for sink in (np.inf, np.nan):  # as a softmax of these
        problem.inputs["sinks"] = np.array([sink], np.float32)
        output, sums = call(compiled(spec, kernel, arch), problem)
        assert np.isnan(from_storage(output)).all(), sink
        assert sums is None or np.isnan(sums).all(), sink


IN_FP16 = [*((*s, False) for s in ON_TENSOR_CORES), ("hopper", "sm_90a", True)]


@pytest.mark.parametrize(("kernel", "arch", "by_row"), tiers.cases(IN_FP16, quick=IN_FP16[-1:]))
def test_sinks_far_above_all_scores(kernel: str, arch: str, by_row: bool) -> None:
    """Weights relative to such a sink are too small for fp16; relative to the largest score they are not."""
    sink, dims = ("sinks[h, q]", ("heads", "q_len")) if by_row else ("sinks[h]", ("heads",))
    spec = attngen.define(dtype="fp16", head_dim=64, mask="causal", sink=sink, inputs={"sinks": ("fp32", dims)}, lse=True)
    problem = whole_numbers(spec)
    for above in (10.0, 14.0, 18.0):
        problem.inputs["sinks"] = np.full((1, Q_LEN)[: len(dims)], above, np.float32)
        assert run(spec, kernel, problem, arch=arch).passed, above


WITH_DROPOUT = [s for s in ON_TENSOR_CORES if s[0] != "decode"]


@pytest.mark.parametrize(("kernel", "arch"), tiers.cases(WITH_DROPOUT, quick=[("hopper", "sm_90a")]))
def test_light_keys_of_which_the_heavy_one_is_dropped(kernel: str, arch: str) -> None:
    """In fp16, weights far below their row's largest are multiples of 2^-24 of it. The bound knows it."""
    spec = attngen.define(dtype="fp16", head_dim=64, score="where(k == q, 14.0, 0.1 * s)", dropout=0.9)
    assert run(spec, kernel, sample(spec, Shape(1, 1, 1, 1, 300)), arch=arch).passed


@pytest.mark.parametrize(("kernel", "arch"), tiers.cases(ON_TENSOR_CORES, quick=[("hopper", "sm_90a")]))
@pytest.mark.parametrize("score", tiers.cases(["51.0 * tanh(s / 51.0)", "softcap(20.0)", "s"], quick=["51.0 * tanh(s / 51.0)"]))
def test_values_far_from_one(kernel: str, arch: str, score: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=64, scale=30.0, score=score)
    problem = whole_numbers(spec)
    for size in (1e-30, 1e-12, 1e25, 1e32):
        v = round_to_storage(np.float32(size) * from_storage(problem.v), spec.dtype)
        assert run(spec, kernel, Sample(problem.q, problem.k, v, {}), arch=arch).passed, size
