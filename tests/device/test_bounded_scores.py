"""Scores that bound themselves: a softmax without maxima, and two soft-caps at once."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES
from attngen.plan.bounded_scores import LEAST, MOST, constant_shift, score_bound
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import call, compiled, run

LENGTH = 200


def spec_of(score: str, head_dim: int = 64, **more) -> AttentionSpec:
    return attngen.define(**{"dtype": "bf16", "head_dim": head_dim, "mask": "causal", "score": score, **more})


@pytest.mark.parametrize(
    ("score", "bound"),
    [
        ("softcap(20.0)", 20.0),
        ("tanh(s)", 1.0),
        ("-3.0 * sigmoid(s)", 3.0),
        ("sin(s * s) * 2.0", 2.0),
        ("s", None),
        ("20.0 * tanh(s / 20.0) + s", None),
        ("s * tanh(s)", None),
    ],
)
def test_what_bounds_a_score(score: str, bound: float | None) -> None:
    assert score_bound(spec_of(score)) == bound


def test_who_needs_no_maximum() -> None:
    assert constant_shift(spec_of("softcap(20.0)")) == pytest.approx(20 * np.log2(np.e), abs=0.01)  # weights are at most 1
    largest = constant_shift(spec_of("softcap(38.0)"))
    assert largest is not None
    octaves = 38 * np.log2(np.e)
    assert octaves - largest <= MOST
    assert -octaves - largest >= LEAST - 0.01
    assert constant_shift(spec_of("softcap(39.0)")) is None  # the range of bf16 is too small
    assert constant_shift(spec_of("softcap(20.0)", dtype="fp16")) is None
    assert constant_shift(spec_of("softcap(20.0)", lse=True)) is None
    assert constant_shift(spec_of("softcap(20.0)", sink="0.5")) is None
    assert constant_shift(spec_of("softcap(20.0)", normalize="sigmoid")) is None
    plan = choose(spec_of("softcap(20.0)"), ARCHES["sm_90a"], "hopper")
    assert plan.own.shift is not None
    assert any(d.field == "maximum" for d in plan.decisions)


SCORES = [("softcap(20.0)", 64), ("softcap(38.0)", 128), ("tanh(s)", 256), ("softcap(9.0)", 80)]


@pytest.mark.parametrize("mask", tiers.cases([None, "causal", "window(50)"], quick=["causal"]))
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("score", "head_dim"), tiers.cases(SCORES, quick=SCORES[:1]))
def test_without_maxima(score: str, head_dim: int, precision: str, mask: str | None) -> None:
    spec = spec_of(score, head_dim, mask=mask, precision=precision)
    assert run(spec, "hopper", Shape(1, 2, 2, LENGTH, LENGTH)).passed


@pytest.mark.parametrize("cap", tiers.cases([20.0, 38.0], quick=[38.0]))
def test_scores_at_their_bounds(cap: float) -> None:
    """Rows all of whose scores are -cap, all cap, and both: the weights are as small and as large as they can be."""
    spec = spec_of(f"softcap({cap})", mask=None, scale=1.0)
    problem = sample(spec, Shape(1, 1, 1, LENGTH, LENGTH))
    q, k = np.zeros((2, 1, 1, LENGTH, 64), np.float32)
    q[..., 0] = np.where(np.arange(LENGTH) < 100, -1e3, 1e3)
    q[..., :50, 1], k[..., 1] = 1e3, np.where(np.arange(LENGTH) % 2, 1e6, -1e6)
    k[..., 0] = 1e3
    extreme = Sample(round_to_storage(q, spec.dtype), round_to_storage(k, spec.dtype), problem.v, {})
    assert run(spec, "hopper", extreme).passed


@pytest.mark.parametrize("key", [4, 5, 130, 131])
def test_a_nan_stays_with_the_rows_that_see_it(key: int) -> None:
    """Two scores share a reciprocal; of a pair that the mask parts, the forbidden key's NaN must not reach the other."""
    spec = spec_of("softcap(20.0)")
    problem = sample(spec, Shape(1, 1, 1, LENGTH, LENGTH))
    kernel = compiled(spec, "hopper")
    clean = from_storage(call(kernel, problem)[0])[0, 0]
    k = from_storage(problem.k)
    k[..., key, :] = np.nan
    found = from_storage(call(kernel, Sample(problem.q, round_to_storage(k, spec.dtype), problem.v, {}))[0])[0, 0]
    assert np.array_equal(found[:key], clean[:key])
    assert np.isnan(found[key:]).all()
