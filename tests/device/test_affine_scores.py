"""Scores with a term that is affine in k, whatever its slope: rows' limits and exponents make up for what is not added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import KernelRequest
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import run

SHAPE = Shape(1, 1, 1, 150, 333)  # partial tiles of rows and of keys, and several whole ones
# a slope, and what multiplies Q
SIZES = (
    (0.0, 1.0),
    (1.0, 1.0),
    (-1.0, 1.0),
    (0.01, 1.0),
    (-0.01, 100.0),
    (700.0, 1.0),
    (-700.0, 100.0),
    (1e9, 1.0),
    (-1e30, 1.0),
    (1e36, 1.0),
    (-1e36, 1.0),
)
ALIBI = "s + slope * (k - q)"
FALLING = "s + slope * (q - k)"
CASES: dict[str, dict[str, Any]] = {
    "all pairs": {"score": ALIBI},
    "rising keys": {"score": "s + slope * k"},
    "causal": {"score": ALIBI, "mask": "causal_bottom_right"},
    "causal, lse": {"score": ALIBI, "mask": "causal", "lse": True},
    "far keys": {"score": ALIBI, "mask": "k >= q + 20 or k < 10"},
    "few keys": {"score": ALIBI, "mask": "abs(q - k) == 90"},
    "sink": {"score": ALIBI, "sink": "1.5"},
    "soft-cap": {"score": "softcap(20.0) + slope * (k - q)", "mask": "causal_bottom_right"},
    "two terms": {"score": "slope * (q - k) + 0.25 * s + 0.5 * k", "head_dim": 128},
    "wide": {"score": ALIBI, "mask": "causal_bottom_right", "head_dim": 256},
    "documents": {
        "score": ALIBI, "mask": "same_document(ids)", "head_dim": 128, "inputs": {"ids": ("int32", ("batch", "kv_len"))}
    },
    "three consumers": {"score": ALIBI, "tile": (192, 64)},
    # tiles from the first to the last: all full but the last; two partial ones before a full one
    "falling": {"score": FALLING, "head_dim": 128},
    "falling, steep": {"score": FALLING, "mask": "k >= 2 * q and k < 2 * q + 320", "tile": (128, 64)},
}  # fmt: skip


@pytest.mark.parametrize("name", tiers.cases(list(CASES), one_of=3))
def test_any_slope(name: str) -> None:
    described = {"dtype": "bf16", "head_dim": 64, "params": {"slope": ("float", 1.0)}, **CASES[name]}
    tile = described.pop("tile", None)
    spec = attngen.define(**described)
    if tile:
        spec = replace(spec, kernel=KernelRequest("hopper", *tile, 2))
    problem = sample(spec, SHAPE)
    for slope, size in SIZES:
        larger = replace(problem, q=round_to_storage(np.float32(size) * from_storage(problem.q), spec.dtype))
        found = run(spec, "hopper", larger, arch="sm_90a", slope=slope)
        assert found.passed, (slope, size, found)


@pytest.mark.parametrize("score", tiers.cases(["s + (q - k)", "s + (k - q)", "s - 1e33 * k"], quick=["s + (q - k)"]))
def test_constant_slopes(score: str) -> None:
    spec = attngen.define(dtype="fp16", head_dim=64, score=score)
    assert run(spec, "hopper", SHAPE, arch="sm_90a").passed
