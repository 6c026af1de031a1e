"""Integers at the ends of their types in expressions, on the emulated device as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attngen
from attngen.language import load_text
from attngen.reference.problems import Shape, sample
from tests.harness import compared, compiled, run


def test_magnitudes_beyond_32_bits() -> None:
    """C's `abs` takes an int, and gives a negative number for the least one."""
    spec = attngen.define(
        dtype="fp32", head_dim=8, inputs={"doc": ("int32", ("kv_len",))}, mask="abs(doc[k]) > 7 or max(abs(doc[k]), -44) == 3"
    )
    problem = sample(spec, Shape(1, 1, 1, 3, 40))
    doc = np.array([-(2**31), 3, -3, 7, 8] * 8, np.int32)
    found = run(spec, "naive", replace(problem, inputs={"doc": doc}))
    assert found.passed, found


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_remainders_of_the_least_integer_and_minus_1(dtype: str) -> None:
    """C++ does not define them, and a CPU ends the program."""
    text = f"""attention t {{
        dtype fp32  head_dim 8  param n: int  input doc: {dtype}[kv_len]
        mask doc[k] % n == 0 or doc[k] % n + k > 30
    }}"""
    (spec,) = load_text(text)
    problem = sample(spec, Shape(1, 1, 1, 3, 40))
    least = np.iinfo(dtype).min
    doc = np.array([least, 3, -3, 7, least + 1] * 8, dtype)
    kernel = compiled(spec, "naive")
    for n in (-1, 2, -7):
        found = compared(kernel, replace(problem, inputs={"doc": doc}), n=n)
        assert found.passed, (n, found)


def test_floats_beyond_32_bits_and_nan_as_integers() -> None:
    """`int` keeps them within 32 bits, as a GPU does; on a CPU they are -2^31."""
    spec = attngen.define(
        dtype="fp32", head_dim=8, inputs={"x": ("fp32", ("kv_len",))}, score="s + float(int(x[k]) // 1048576) / 2048.0",
    )  # fmt: skip
    problem = sample(spec, Shape(1, 1, 1, 3, 40))
    x = np.array([1e10, -1e10, np.inf, -np.inf, np.nan, 2147483520.0, -(2.0**31), 3.9] * 5, np.float32)
    found = run(spec, "naive", replace(problem, inputs={"x": x}))
    assert found.passed, found


@pytest.mark.parametrize("schedule", ["fused", "hopper"])
def test_a_mask_that_fits_64_bits_as_it_is_written_alone(schedule: str) -> None:
    spec = attngen.define(
        dtype="fp16",
        head_dim=64,
        inputs={"x": ("int64", ("kv_len",)), "y": ("int64", ("q_len",))},
        mask="causal and max(x[k], 0) < max(y[q], 0) - 3",
    )
    problem = sample(spec, Shape(1, 1, 1, 70, 70))
    rng = np.random.default_rng(0)
    inputs = {name: rng.choice([-(2**63), 0, 4, 2**63 - 1], 70) for name in "xy"}
    found = run(spec, schedule, replace(problem, inputs=inputs))
    assert found.passed, found
