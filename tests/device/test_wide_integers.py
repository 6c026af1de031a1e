"""Integers of 64 bits in expressions, on the emulated device as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import attngen
from attngen.reference.problems import Shape, sample
from tests.harness import run


def test_magnitudes_beyond_32_bits() -> None:
    """C's `abs` takes an int, and gives a negative number for the least one."""
    spec = attngen.define(
        dtype="fp32", head_dim=8, inputs={"doc": ("int32", ("kv_len",))}, mask="abs(doc[k]) > 7 or max(abs(doc[k]), -44) == 3"
    )
    problem = sample(spec, Shape(1, 1, 1, 3, 40))
    doc = np.array([-(2**31), 3, -3, 7, 8] * 8, np.int32)
    found = run(spec, "naive", replace(problem, inputs={"doc": doc}))
    assert found.passed, found
