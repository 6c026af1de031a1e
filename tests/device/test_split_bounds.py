"""The error limits of fp32 with `precision high`: products of split numbers err by a share of their terms, not of their sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.reference.compare import truth
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec
from tests import tiers
from tests.harness import compiled, run, wrong_gradients


def high(**described) -> AttentionSpec:
    return attngen.define(dtype="fp32", head_dim=64, precision="high", **described)


@pytest.mark.long
@pytest.mark.parametrize("kv_len", tiers.cases([1, 2, 60], quick=[1]))
def test_gradients_whose_terms_cancel(kv_len: int) -> None:
    """With one key, dP is delta, and dQ and dK are 0: what is left of them is the error of dP."""
    kernel = compiled(high(), "fused", "sm_80")
    assert kernel.plan.schedule.name == "fused_mma"
    assert wrong_gradients(kernel, Shape(1, 2, 1, 40, kv_len)) == []


def test_large_scores() -> None:
    """The error of a score, a share of its terms, is multiplied with 10: weights and O have more than one of 16 bits each."""
    spec = high(score="s * 10.0", mask="causal")
    problem = sample(spec, Shape(1, 1, 1, 70, 70))
    problem = replace(problem, q=problem.q * np.float32(25.0))
    found = run(spec, "fused", problem, arch="sm_80")
    assert found.passed, found


def test_usual_scores() -> None:
    spec = high()
    assert truth(spec, sample(spec, Shape(1, 2, 1, 100, 300))).allowed < 4e-5
