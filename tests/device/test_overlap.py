"""Outputs that lie on inputs are refused, views that interleave with them are not."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import attngen
from attngen import ArgumentError
from attngen.device.arrays import CPU, ArrayView
from attngen.device.overlap import byte_range, overlaps_itself, share_memory
from attngen.spec.dtypes import DTYPES


def random_view(rng: np.random.Generator, dtype: str) -> tuple[ArrayView, list[int]]:
    """(a view, the offset of each of its elements in bytes)."""
    rank = int(rng.integers(0, 5))
    shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 5, rank))
    strides = tuple(int(s) for s in rng.integers(-30, 31, rank) * rng.choice([0, 1, 1, 1], rank))
    size = DTYPES[dtype].bytes
    elements = [size * sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))]
    return ArrayView("x", 0, shape, strides, DTYPES[dtype], CPU, None), elements


def test_overlap_is_exact() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(1500):
        one, its = random_view(rng, "fp16")
        other, others = random_view(rng, "fp32")
        distance = int(rng.integers(-100, 100))
        mine = {e + i for e in its for i in range(2)}
        theirs = {distance + e + i for e in others for i in range(4)}
        verdict = (overlaps_itself(one), share_memory(one, other, distance))
        assert verdict == (len(set(its)) < len(its), bool(mine & theirs)), (one, other, distance)
        assert byte_range(one) == ((min(mine), max(mine) + 1) if mine else (0, 0))
        seen.add(verdict)
    assert len(seen) == 4


@pytest.fixture(scope="module")
def kernel() -> attngen.CompiledAttention:
    return attngen.compile(attngen.define(head_dim=16, lse=True), kernel="naive", device="emulated:fast")


def packed(parts: int) -> list[np.ndarray]:
    """q, k, v, ... [batch, heads, length, size] in one array, as a projection leaves them."""
    values = np.random.default_rng(0).standard_normal((2, 9, parts, 4, 16)).astype(np.float16)
    return [values[:, :, i].transpose(0, 2, 1, 3) for i in range(parts)]


def test_an_output_in_the_unused_part_of_a_packed_array(kernel) -> None:
    q, k, v, o = packed(4)
    expected, _ = kernel(q, k, v)
    kernel(q, k, v, out=o)
    assert np.array_equal(o, expected)


def test_an_output_on_an_input_that_is_not_contiguous_is_refused(kernel) -> None:
    q, k, v = packed(3)
    shared = np.zeros((2, 4, 10, 16), np.float16)
    cases = {
        "the same view": ({"out": q}, "`out` and `q`"),
        "its rows reversed": ({"out": k[:, :, ::-1]}, "`out` and `k`"),
        "one row later": ({"q": shared[:, :, :9], "out": shared[:, :, 1:]}, "`out` and `q`"),
        "one head of it": (
            {"out": np.zeros((2, 4, 9, 16), np.float16), "lse": v.view(np.float32)[:, :, :, 0]},
            "`lse` and `v`",
        ),
        "every second row": ({"q": shared.reshape(2, 4, 5, 32)[:, :, :4, :16], "out": shared[:, :, :4]}, "`out` and `q`"),
    }
    for changed, said in cases.values():
        given = {"q": q, "k": k, "v": v} | changed
        with pytest.raises(ArgumentError, match=f"{said} share memory"):
            kernel(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    rows = np.lib.stride_tricks.as_strided(np.zeros(2000, np.float16), (2, 4, 9, 16), (1000, 240, 16, 2))
    with pytest.raises(ArgumentError, match="elements of `out` share memory"):
        kernel(q, k, v, out=rows)
