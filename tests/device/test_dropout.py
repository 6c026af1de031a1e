"""Dropout by every schedule: which weights are kept, bit by bit, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.arrays import ArgumentError
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import KernelRequest
from attngen.spec.dropout import bytes_of_pairs, dropped_of
from attngen.spec.dtypes import from_storage, round_to_storage
from tests import tiers
from tests.harness import compiled, run, wrong_gradients

WINDOW = 64  # keys whose weights are the elements of O: as many as the head size of V
SCHEDULES = (
    ("naive", "sm_80", "fp32"), ("tiled", "sm_80", "fp16"), ("fused", "sm_75", "fp32"), ("fused", "sm_80", "fp32"),
    ("fused", "sm_80", "bf16"), ("wgmma", "sm_90a", "bf16"), ("hopper", "sm_90a", "fp16"),
)  # fmt: skip
TILES = (
    ("fused", "sm_80", "fp32", KernelRequest("fused", 32, 16)),
    ("fused", "sm_80", "bf16", KernelRequest("fused", 64, 16)),
    ("hopper", "sm_90a", "bf16", KernelRequest("hopper", 192, 80)),
)
KERNELS = [*((*one, None) for one in SCHEDULES), *TILES]


def kept_of(kernel: Any, seed: int, offset: int, first_key: int, shape: Shape) -> np.ndarray:
    """Which weights of the keys from `first_key` on a kernel keeps: V is the identity there, so that O has them as elements."""
    spec = kernel.spec
    problem = sample(spec, shape)
    v = np.zeros((shape.batch, shape.kv_heads, shape.kv_len, WINDOW), np.float32)
    v[:, :, first_key : first_key + WINDOW] = np.eye(WINDOW)
    o = kernel(problem.q, problem.k, round_to_storage(v, spec.dtype), seed=seed, offset=offset, p=0.3)
    return from_storage(o) != 0


@pytest.mark.parametrize(("schedule", "arch", "dtype", "tile"), tiers.cases(KERNELS, quick=[KERNELS[6]]))
def test_every_schedule_and_tile_keeps_the_same_weights(
    schedule: str, arch: str, dtype: str, tile: KernelRequest | None
) -> None:
    spec = attngen.define(dtype=dtype, params={"p": "float"}, dropout="p")
    kernel = compiled(spec if tile is None else replace(spec, kernel=tile), schedule, arch)
    shape, (seed, offset) = Shape(1, 2, 1, 40, 170), (2**63 + 12345, 2**33 + 1)
    b, h, q, k = np.ogrid[:1, :2, :40, :170]
    expected = bytes_of_pairs(np.array([seed - 2**64]), np.array([offset]), b, h, q, k) >= dropped_of(0.3)
    for first in (0, 106):
        assert (kept_of(kernel, seed, offset, first, shape) == expected[..., first : first + WINDOW]).all()


BACKWARDS = [one for one in SCHEDULES if one[0] != "wgmma"]
CASES = [(*one, "softmax") for one in BACKWARDS] + [("fused", "sm_80", "fp32", "sigmoid"), ("fused", "sm_80", "bf16", "none")]


@pytest.mark.parametrize(
    ("schedule", "arch", "dtype", "normalize"), tiers.cases(CASES, quick=[("fused", "sm_80", "bf16", "softmax")])
)
def test_results_and_gradients(schedule: str, arch: str, dtype: str, normalize: str) -> None:
    """Unequal head sizes and grouped heads; of a softmax a sink and lse; a captured gradient, if the schedule has any."""
    more: dict[str, Any] = {"sink": 0.5, "lse": True} if normalize == "softmax" else {}
    if schedule != "hopper":
        more |= {"score": "s * x[h]", "inputs": {"x": ("fp32", ("heads",))}}
    spec = attngen.define(
        dtype=dtype, head_dim=16, head_dim_v=24, mask="causal", dropout=0.4, normalize=normalize, **more
    )  # fmt: skip
    kernel = compiled(spec, schedule, arch)
    shape = Shape(1, 2, 1, 70, 90)
    assert run(spec, schedule, shape, arch=arch).passed
    assert not wrong_gradients(kernel, shape, ("q", "k", "v", *(["x"] if "x" in more.get("inputs", ()) else [])))


def test_what_a_call_must_say() -> None:
    spec = attngen.define(dtype="fp32", head_dim=8, params={"p": "float"}, dropout="p", kernel="naive")
    kernel = compiled(spec, "naive")
    x = np.zeros((1, 1, 4, 8), np.float32)
    for given, message in (
        ({}, "pass seed="),
        ({"offset": 3}, "pass either seed="),
        ({"seed": 2**64}, "at most 64 bits"),
        ({"seed": 0.5}, "expected an int"),
        ({"seed": 1, "rng_state": np.zeros(2, np.int64)}, "pass either seed="),
        ({"rng_state": np.zeros(3, np.int64)}, "rng_state"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(x, x, x, p=0.5, **given)
    with pytest.raises(ArgumentError, match="the share of dropped weights, is 1"):
        kernel(x, x, x, p=1.0, seed=1)
    state = np.array([5, 2], np.int64)
    v = np.random.default_rng(0).standard_normal(x.shape, dtype=np.float32)
    assert (kernel(x, x, v, p=0.5, rng_state=state) == kernel(x, x, v, p=0.5, seed=5, offset=2)).all()
    assert np.allclose(kernel(x, x, v, p=0.0, seed=5), v.mean(2, keepdims=True), atol=1e-6)
