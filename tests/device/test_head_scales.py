"""Factors of `s` that all pairs of a head share: positive ones in the exponent's factor, by others each score is multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES
from attngen.plan.head_scale import head_factor, with_head_scale
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.dtypes import from_storage, round_to_storage
from attngen.spec.print_attn import expression_to_text
from tests import tiers
from tests.harness import call, compiled, emitted, run

SCHEDULES = (("fused", "sm_80"), ("hopper", "sm_90a"))
FACTORS = (1.3, -0.7, 0.0, 2.0**-70, -(2.0**-70), 1e30, -1e30, 2.0**60)  # one for each head
SHAPE = Shape(2, len(FACTORS), 2, 70, 150)
READ: dict[str, Any] = {"inputs": {"ks": ("fp32", ("batch", "heads"))}}
SINKS, DOCUMENTS = ("fp32", ("heads",)), ("int32", ("batch", "kv_len"))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"score": "s * ks[b, h]"},
    "causal": {"score": "ks[b, h] * s", "mask": "causal"},
    "divided": {"score": "s / ks[b, h]", "mask": "q >= k or k < 3"},
    "params": {"score": "s * (t * ks[b, h])", "params": {"t": 1.0}, "scale": "t"},
    "sink and lse": {"score": "s * ks[b, h]", "inputs": READ["inputs"] | {"z": SINKS}, "sink": "z[h]", "lse": True},
    "soft-cap": {"score": "2.0 * tanh(s * ks[b, h] / 2.0)", "mask": "window(20) and causal"},
    "bias": {"score": "s * ks[b, h] + 0.25 * k"},
    "wide": {"score": "s * ks[b, h]", "head_dim": 320, "mask": "causal", "lse": True},
    "documents": {"score": "s * ks[b, h]", "inputs": READ["inputs"] | {"d": DOCUMENTS}, "mask": "same_document(d)"},
}  # fmt: skip
EVERY = [(*s, dtype, variant) for s in SCHEDULES for dtype in ("bf16", "fp16", "fp32") for variant in VARIANTS]


def scaled(dtype: str = "bf16", **described: Any) -> AttentionSpec:
    return attngen.define(**({"dtype": dtype, "head_dim": 64, "scale": 1.0} | READ | described))


def whole_numbers(spec: AttentionSpec, factors: tuple[float, ...]) -> Sample:
    """Q and K of -1, 0 and 1, of which few are not 0: scores are exact, and those of several keys are equal."""
    problem, rng = sample(spec, SHAPE), np.random.default_rng(0)
    q, k = (np.zeros(x.shape, np.float32) for x in (problem.q, problem.k))
    q[..., :4], k[..., :4] = (rng.integers(-1, 2, (*x.shape[:3], 4)) for x in (q, k))
    problem.inputs["ks"] = np.array([factors, factors[::-1]], np.float32)
    return Sample(round_to_storage(q, spec.dtype), round_to_storage(k, spec.dtype), problem.v, problem.inputs)


@pytest.mark.parametrize(
    ("score", "factor", "rest"),
    [
        ("s * ks[b, h]", "ks[b, h]", "s"),
        ("2.0 * (s / ks[b, h])", "1.0 / ks[b, h] * 2.0", "s"),
        ("s * ks[b, h] + s", None, None),
        ("s * ks[b, h] * (k + 1)", "ks[b, h]", "s * float(k + 1)"),
        ("tanh(s * ks[b, q])", None, None),
        ("ks[b, h] / s", None, None),
        ("2.0 * s + ks[b, h]", None, None),
    ],
)
def test_which_factors_join_the_scale(score: str, factor: str | None, rest: str | None) -> None:
    spec = scaled(score=score)
    found = with_head_scale(spec)
    if factor is None:
        assert found is spec
        return
    assert expression_to_text(head_factor(spec)) == factor
    assert expression_to_text(found.score) == rest


@pytest.mark.parametrize(("kernel", "arch"), SCHEDULES)
def test_a_factor_of_heads_is_no_operation_of_a_pair(kernel: str, arch: str) -> None:
    spec, plain = scaled(score="s * ks[b, h]"), attngen.define(dtype="bf16", head_dim=64)
    assert with_head_scale(spec).score is S
    ours, theirs = (choose(s, ARCHES[arch], kernel) for s in (spec, plain))
    assert (ours.tile, ours.own) == (theirs.tile, theirs.own)
    assert "float score(" not in emitted(spec, kernel, arch).text


@pytest.mark.parametrize(
    ("kernel", "arch", "dtype", "variant"),
    tiers.cases(
        EVERY,
        quick=[("hopper", "sm_90a", "bf16", "sink and lse"), ("fused", "sm_80", "bf16", "causal")],
        one_of=8,
    ),
)
def test_factors_of_any_sign_and_size(kernel: str, arch: str, dtype: str, variant: str) -> None:
    if (kernel, dtype) == ("hopper", "fp32"):
        pytest.skip("16 bits only")
    spec = scaled(dtype, **VARIANTS[variant])
    sizes = FACTORS if variant != "divided" else tuple(f or 3.0 for f in FACTORS)
    found = run(spec, kernel, whole_numbers(spec, sizes), arch=arch)
    assert found.passed, found


@pytest.mark.parametrize(("kernel", "arch"), SCHEDULES)
def test_heads_beside_those_of_infinite_and_nan_factors(kernel: str, arch: str) -> None:
    spec = scaled(score="s * ks[b, h]", mask="causal")
    problem = whole_numbers(spec, (np.nan, 1.0, np.inf, -np.inf, -1.0, 0.0, np.nan, 2.0))
    output = from_storage(call(compiled(spec, kernel, arch), problem)[0])
    is_number = np.isfinite(problem.inputs["ks"])
    expected = run(spec, "naive", problem)
    assert np.isfinite(output[is_number]).all()
    assert np.isnan(output[~is_number][:, 5:]).any(axis=(1, 2)).all(), expected


@pytest.mark.long
@pytest.mark.parametrize(("rows", "keys"), [(192, 64), (256, 48)])
def test_consumers_with_tiles_of_their_own(rows: int, keys: int) -> None:
    spec = scaled(score="s * ks[b, h]", mask="causal_bottom_right", tile=(rows, keys), kernel="hopper", lse=True)
    found = run(spec, "hopper", whole_numbers(spec, FACTORS), arch="sm_90a")
    assert found.passed, found
