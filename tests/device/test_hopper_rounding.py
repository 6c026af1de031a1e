"""Rounding and rescaling on the hopper schedule, with row maxima that are kept or raised."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import call, compiled, run

LENGTH = 256


def with_scores(spec: AttentionSpec, scores: np.ndarray) -> Sample:
    """randn values, and queries and keys whose products are `scores` [kv_len] in every row."""
    problem = sample(spec, Shape(1, 1, 1, LENGTH, LENGTH))
    q, k = np.zeros((2, 1, 1, LENGTH, spec.head_dim), np.float32)
    q[..., 0], k[..., 0] = 1.0, scores
    return Sample(round_to_storage(q, spec.dtype), round_to_storage(k, spec.dtype), problem.v, {})


def spec_of(head_dim: int, mask: str | None, **more) -> AttentionSpec:
    return attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, scale=1.0, **more)


@pytest.mark.parametrize("mask", tiers.cases([None, "causal"], quick=["causal"]))
@pytest.mark.parametrize("head_dim", tiers.cases([64, 128, 256], quick=[256]))
def test_a_dominant_weight_is_not_rounded_away(head_dim: int, mask: str | None) -> None:
    """Key 200 is met first. Key 5 then weighs e^5.16 = 173.51 times as much, too little for a new maximum under a mask: in P
    it is 174 if it is not 1. That must not be seen in O, which is right to half a step of bf16."""
    spec = spec_of(head_dim, mask)
    scores = np.full(LENGTH, -64.0)
    scores[200], scores[5] = 0.0, 5.15625
    problem = with_scores(spec, scores)
    problem.v[:, :, 200] = 0
    found, _ = call(compiled(spec, "hopper"), problem)
    output = from_storage(found)[0, 0, 200:]
    exact = from_storage(problem.v)[0, 0, 5] / (1 + np.exp(-5.15625))
    half_steps = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
    assert np.max(np.abs(output - exact) / half_steps) <= 1.02


@pytest.mark.parametrize("octaves", tiers.cases([3.0, 20.0], quick=[20.0]))
@pytest.mark.parametrize("offset", [0.0, -300.0])
@pytest.mark.parametrize("mask", tiers.cases([None, "causal", "window(100)"], quick=["causal"]))
@pytest.mark.parametrize(
    ("head_dim", "lse"), tiers.cases([(64, False), (64, True), (96, False), (256, False)], quick=[(96, False)])
)
def test_maxima_that_fall_along_the_keys(head_dim: int, lse: bool, mask: str | None, offset: float, octaves: float) -> None:
    """Tiles are visited from the last to the first: each one raises the row maximum, with scores of either sign."""
    spec = spec_of(head_dim, mask, lse=lse)
    problem = with_scores(spec, offset + octaves / 64 * np.log(2) * np.arange(LENGTH)[::-1])
    assert run(spec, "hopper", problem).passed


def test_row_sums_are_products_where_there_is_room() -> None:
    def row_sums(**what) -> str:
        roles = choose(attngen.define(dtype="bf16", **what), ARCHES["sm_90a"], "hopper").own
        assert roles is not None
        return roles.row_sums

    assert (
        row_sums(head_dim=64) == row_sums(head_dim=128, mask="causal") == row_sums(head_dim=192, head_dim_v=128) == "products"
    )
    assert row_sums(head_dim=64, lse=True) == "weights"  # lse is of the weights themselves
    assert row_sums(head_dim=96) == row_sums(head_dim=64, normalize="sigmoid") == "weights"
    assert row_sums(head_dim=256, mask="causal") == "weights, the heaviest rounded"
    assert row_sums(head_dim=256) == "weights"  # the heaviest is exact
