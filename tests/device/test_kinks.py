"""Gradients at kinks and beside branches that are not taken: those of torch's autograd for the functions that are taken."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import attngen
from attngen.device.emulated import EmulatedDevice
from attngen.reference.gradients import sample_loss
from attngen.reference.problems import Shape, sample
from attngen.spec.dtypes import from_storage
from tests import tiers
from tests.harness import gradients

# A term of the score, and its derivative by x, an array whose values are multiples of a half between -8 and 8.
TERMS: dict[str, Callable] = {
    "clamp(x, -1.0, 1.0)": lambda x: (x >= -1) & (x <= 1),
    "min(x, 0.5)": lambda x: x <= 0.5,
    "max(-1.0, x)": lambda x: x >= -1,
    "abs(x)": np.sign,
    "where(x > 0.0, sqrt(x), x)": lambda x: np.where(x > 0, 0.5 / np.sqrt(np.where(x > 0, x, 1)), 1),
    "where(x == 0.0, 0.0, 2.0 / x)": lambda x: np.where(x == 0, 0, -2 / np.where(x == 0, 1, x) ** 2),
    "where(x > 0.0, log(x), 0.0) * where(x > 0.0, sqrt(x), 0.0)": lambda x: np.where(
        x > 0, (0.5 * np.log(np.where(x > 0, x, 1)) + 1) / np.sqrt(np.where(x > 0, x, 1)), 0
    ),
    "where(x < 9.0, x, exp(1000.0 * abs(x)))": np.ones_like,
    "max(sqrt(abs(x)), 0.1)": lambda x: np.where(x == 0, 0, 0.5 * np.sign(x) / np.sqrt(np.where(x == 0, 1, abs(x)))),
}


@pytest.mark.parametrize(
    ("schedule", "arch", "dtype"),
    tiers.cases(
        [("naive", "sm_80", "fp32"), ("tiled", "sm_80", "fp32"), ("fused", "sm_75", "fp32"), ("fused", "sm_80", "bf16")],
        quick=[("fused", "sm_80", "bf16")],
    ),
)
def test_kinks_and_branches_that_are_not_taken(schedule: str, arch: str, dtype: str) -> None:
    """One kernel adds all terms to the score, and `plain` too: their gradients are that of `plain` times the derivative."""
    names = [f"x{i}" for i in range(len(TERMS))]
    terms = [re.sub(r"\bx\b", f"{name}[k]", term) for term, name in zip(TERMS, names, strict=True)]
    spec = attngen.define(
        dtype=dtype,
        head_dim=16,
        score=" + ".join(["s", "plain[k]", *terms]),
        inputs=dict.fromkeys(("plain", *names), ("fp32", ("kv_len",))),
    )
    problem = sample(spec, Shape(1, 2, 2, 33, 33))
    rng = np.random.default_rng(0)
    for name in names:
        problem.inputs[name] = rng.permutation(np.arange(-16, 17)).astype(np.float32) / 2
    kernel = attngen.compile(spec, kernel=schedule, device=EmulatedDevice(checked=False, arch=arch))
    found = gradients(kernel, problem, sample_loss(spec, problem), ("q", "plain", *names))
    plain = from_storage(found["plain"])
    assert abs(plain).max() > 0.01
    assert np.isfinite(from_storage(found["q"])).all()
    for name, (term, derivative) in zip(names, TERMS.items(), strict=True):
        expected = plain * derivative(problem.inputs[name].astype(np.float64))
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=2e-5, err_msg=term)
