"""Wrong lengths and beginnings of sequences: the host does not see them, and no kernel follows them outside of a tensor."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import attngen
from attngen.api import CompiledAttention
from attngen.keywords import ScheduleName
from attngen.spec.attention import Storage
from tests import tiers

RNG = np.random.default_rng(0)
LOW, HIGH = -(2**31), 2**31 - 1
ROWS = 9
BEGINS = {  # and the same inside the 9 rows
    "negative": ([-4, 4, 9], [0, 4, 9]),
    "decreasing": ([4, 2, 9], [4, 4, 9]),
    "beyond the end": ([0, 4, 100], [0, 4, 9]),
    "anything": ([LOW, 3, HIGH], [0, 3, 9]),
    "both beyond": ([100, 200, LOW], [9, 9, 9]),
}
SCHEDULES: list[tuple[ScheduleName, str]] = [
    ("naive", "sm_80"), ("fused", "sm_80"), ("tiled", "sm_80"), ("fused", "sm_75"), ("decode", "sm_80"), ("decode", "sm_90a"),
    ("wgmma", "sm_90a"), ("hopper", "sm_90a"),
]  # fmt: skip


@cache
def compiled(schedule: ScheduleName, arch: str, storage: Storage) -> CompiledAttention:
    size = {} if schedule != "hopper" or "paged" not in storage else {"page_size": 16}
    spec = attngen.define(
        dtype="fp16", head_dim=64, mask="causal_bottom_right", storage=storage, kernel=schedule, lse=True, **size
    )
    return attngen.compile(spec, device="emulated", arch=arch)


def randn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize(("schedule", "arch"), tiers.cases(SCHEDULES, quick=[("naive", "sm_80")]))
def test_beginnings_outside_of_packed_rows(schedule: ScheduleName, arch: str) -> None:
    """A sequence is what lies within all rows."""
    kernel = compiled(schedule, arch, "packed")
    q, k, v = randn(ROWS, 2, 64), randn(ROWS, 1, 64), randn(ROWS, 1, 64)
    for wrong, right in BEGINS.values():
        results = []
        for begins in (wrong, right):
            each = np.array(begins, np.int32)
            results.append(kernel(q, k, v, cu_seqlens_q=each, cu_seqlens_k=each, max_q_len=ROWS, max_kv_len=ROWS))
        if wrong[1] >= wrong[0]:
            for found, expected in zip(*results, strict=True):
                np.testing.assert_array_equal(found, expected)


BACKWARDS = [one for one in SCHEDULES if one[0] in ("naive", "fused", "tiled", "hopper")]


@pytest.mark.parametrize(("schedule", "arch"), tiers.cases(BACKWARDS, quick=[]))
def test_gradients_of_beginnings_outside_of_packed_rows(schedule: ScheduleName, arch: str) -> None:
    kernel = compiled(schedule, arch, "packed")
    q, k, v, dout = randn(ROWS, 2, 64), randn(ROWS, 1, 64), randn(ROWS, 1, 64), randn(ROWS, 2, 64)
    for wrong, right in BEGINS.values():
        results = []
        for begins in (wrong, right):
            each = np.array(begins, np.int32)
            named = {"cu_seqlens_q": each, "cu_seqlens_k": each, "max_q_len": ROWS, "max_kv_len": ROWS}
            out, lse = kernel(q, k, v, **named)
            lse = np.nan_to_num(lse, nan=0.0)
            results.append(kernel.backward(dout, q, k, v, out=out, lse=lse, deterministic=True, **named))
        if wrong[1] >= wrong[0]:
            for name in ("q", "k", "v"):
                np.testing.assert_array_equal(results[0][name], results[1][name])


COUNTED: list[tuple[ScheduleName, str, Storage]] = [
    (schedule, arch, storage)
    for schedule, arch in SCHEDULES
    for storage in ("padded", "paged")
    if arch != "sm_75" and schedule != "wgmma"
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "arch", "storage"), tiers.cases(COUNTED, quick=[("naive", "sm_80", "paged")]))
def test_numbers_of_keys_that_no_array_has(schedule: ScheduleName, arch: str, storage: Storage) -> None:
    """A number below 0 is none, and one that is too large counts as all."""
    kernel = compiled(schedule, arch, storage)
    q, pool = randn(3, 2, 5, 64), randn(3, 1, 16, 64)
    where = {"page_table": np.array([[0], [1], [2]], np.int32)} if storage == "paged" else {}
    wrong = kernel(q, pool, pool, seqused=np.array([-3, HIGH, LOW], np.int32), **where)
    right = kernel(q, pool, pool, seqused=np.array([0, 16, 0], np.int32), **where)
    for found, expected in zip(wrong, right, strict=True):
        np.testing.assert_array_equal(found, expected)
