"""Scores that are a single name, but not that of the scaled dot product."""

from __future__ import annotations

import pytest

from attngen.language import load_text
from attngen.reference.problems import Shape
from tests.harness import run

KERNELS = ("naive", "tiled", "fused", "wgmma", "hopper")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_score_that_is_a_param(kernel: str) -> None:
    (spec,) = load_text("attention constant { dtype bf16 head_dim 16 param level: float score level sink 1.5 output lse }")
    found = run(spec, kernel, Shape(1, 1, 1, 17, 70), level=0.7)
    assert found.passed, found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_param_of_a_mask_that_is_always_true(kernel: str) -> None:
    """Bounds show that every tile is full, so that no function reads the param."""
    (spec,) = load_text("attention whole { dtype bf16 head_dim 16 param w: int mask k <= q + w or w == w score s + tanh(s) }")
    found = run(spec, kernel, Shape(1, 1, 1, 17, 70), w=3)
    assert found.passed, found
