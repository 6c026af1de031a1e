"""Decode by wgmma: latent attention with 64 rows or more for each key head."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.cli.specs import own_problem
from attngen.plan import ARCHES, Problem
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose, schedules_for
from attngen.schedules.decode import DECODE, DECODE_WGMMA
from attngen.spec.attention import AttentionSpec, Storage
from attngen.spec.dtypes import from_storage, nans, round_to_storage
from tests import tiers
from tests.device.test_paged import in_pages, wrong
from tests.harness import call, compared, compile_text, compiled, emitted, is_right, run, solved
from tests.left_out import first_finding, removable, unnoticed

ARCH = "sm_90a"
SYNCHRONIZATION = re.compile(
    r"named_barrier_sync\(BOTH[^;]*;|cp_async_wait<[^>]+>\(\);|mbarrier_wait\(handed[^;]*;|k\.(?:wait_full|acquire)\([^;]*;|"
    r"async_proxy_fence\(\);|wgmma_wait<[^>]+>\(\);|mbarrier_arrive\(handed[^;]*;|k\.release\([^;]*;"
)


def latent(**more: Any) -> AttentionSpec:
    """The heads of DeepSeek-V3 as they are decoded, unless stated otherwise: one of keys for all."""
    known = {"dtype": "bf16", "head_dim": 576, "values": (0, 512), "heads": (64, 1), "mask": "causal_bottom_right", "lse": True}
    return attngen.define(**(known | more))


PLAIN = latent()
SPECS = {
    "plain": PLAIN,
    "last": latent(dtype="fp16", values=(64, 576), mask="k > q - 100 and q + kv_len - q_len >= k", sink="0.5 - 0.1 * float(h)"),
    "heads": latent(score="s - 0.01 * float(h) * float(q + kv_len - q_len - k)", mask="k < 200 - h and k >= q"),
    "narrow": latent(head_dim=256, values=(0, 128), mask=None, params={"scale": ("float", 0.1)}, scale="scale"),
}
STORED: list[tuple[Storage, int | None]] = [("paged", 64), ("packed_paged", 16), ("padded", None), ("packed_paged", 256)]
# around the sizes of tiles and of pairs of them, without keys, of rows that fill no tile, of several splits
SHAPES = [Shape(1, 64, 1, 1, n) for n in (0, 1, 63, 64, 65, 128, 129, 200)]
MORE = [Shape(2, 64, 1, 3, 130), Shape(1, 64, 1, 4, 700)]


@pytest.mark.parametrize("name", tiers.cases(list(SPECS), quick=["last"]))
def test_right(name: str) -> None:
    spec = SPECS[name]
    assert choose(spec, ARCHES[ARCH], "decode").schedule is DECODE_WGMMA
    for shape in (*SHAPES, *MORE) if name == "plain" else (*SHAPES[1::3], *MORE):
        found = run(spec, "decode", shape, arch=ARCH)
        assert found.passed, (shape, found)


@pytest.mark.parametrize(("storage", "page_size"), tiers.cases(STORED, quick=[]))
def test_sequences_of_a_cache(storage: Storage, page_size: int | None) -> None:
    """Of any length, in pages of any order, beside rows of NaN that no sequence has."""
    spec = in_pages(PLAIN, "decode", storage, page_size)
    assert choose(spec, ARCHES[ARCH]).schedule is DECODE_WGMMA
    # of one split, more tiles than the lanes of a warp have pages of at once
    keys = [0, 1, 64, 65, 2150 if page_size == 64 else 700, 128, 17]
    problem = sample(spec, Shape(len(keys), 64, 1, 2, max(keys)))
    rows = [1, 2, 0, 2, 1, 2, 1] if spec.kernel.is_packed else None
    assert wrong(spec, problem, rows, keys, ARCH, page_size=page_size or 1) == []


@pytest.mark.parametrize("heads", tiers.cases([16, 48, 100, 128], quick=[]))
def test_groups_that_fill_no_tile(heads: int) -> None:
    """Also those whose heads the spec does not state, by the plan of a call."""
    spec = latent(heads=None)
    plan = choose(spec, ARCHES[ARCH], problem=Problem(heads, 4, 4096, 132, heads))
    assert plan.schedule is (DECODE_WGMMA if 4 * heads >= 64 else DECODE)
    kernel = compiled(spec, "auto", ARCH)
    for shape in (Shape(1, heads, 1, 4, 300), Shape(1, heads, 1, 1, 257)):
        found = compared(kernel, sample(spec, shape))
        assert found.passed, (shape, found)


def test_a_stated_group_is_that_of_calls_whose_lengths_are_given() -> None:
    problem = own_problem(latent(), ARCHES[ARCH], None, 1, 4096)
    assert problem is not None
    assert choose(latent(), ARCHES[ARCH], problem=problem).schedule is DECODE_WGMMA


@pytest.mark.parametrize("heads", [64, 32])
def test_the_keyword_stands_for_it_if_the_heads_fill_a_product(heads: int) -> None:
    spec = latent(heads=(heads, 1))
    assert (choose(spec, ARCHES[ARCH], "decode").schedule is DECODE_WGMMA) == (heads == 64)
    assert "decode" in schedules_for(spec, ARCHES[ARCH])


@pytest.mark.parametrize(
    "changed",
    [
        {"normalize": "sigmoid", "lse": False},
        {"values": None, "head_dim": 512},
        {"values": (8, 520)},
        {"values": (0, 448)},
        {"mask": "(k * q) % 3 > 0"},
        {"dtype": "fp32"},
        {"storage": "paged"},
    ],
)
def test_what_it_does_not_compute_is_by_mma_sync(changed: dict[str, Any]) -> None:
    assert choose(latent(**changed), ARCHES[ARCH], "decode").schedule is DECODE


def test_a_row_with_nan_is_nan() -> None:
    for kv_len in (30, 300):
        problem = sample(PLAIN, Shape(1, 64, 1, 1, kv_len))
        q = from_storage(problem.q)
        q[0, 3, 0, 5], q[0, 5, 0, 0] = np.nan, np.inf
        found = compared(compiled(PLAIN, "decode", ARCH), replace(problem, q=round_to_storage(q, PLAIN.dtype)))
        assert found.passed, (kv_len, found)


def test_rows_with_strides_of_their_own() -> None:
    """NaN behind each row of Q and K, behind the last key of a sequence, and between sequences."""
    kernel, problem = compiled(PLAIN, "decode", ARCH), sample(PLAIN, Shape(2, 64, 1, 2, 150))
    memory = nans((2, 3, 70, 640), PLAIN.dtype.numpy)
    memory[:, :2, :64, :576] = problem.q.swapaxes(1, 2)
    cache = nans((2, 200, 2, 640), PLAIN.dtype.numpy)
    cache[:, :150, 1, 64:] = problem.k[:, 0]
    k = cache[:, None, :150, 1, 64:]
    views = replace(problem, q=memory[:, :2, :64, :576].swapaxes(1, 2), k=k, v=PLAIN.values_of(k, None))
    for one, other in zip(call(kernel, problem), call(kernel, views), strict=True):
        assert np.array_equal(from_storage(one), from_storage(other))


@pytest.mark.long
def test_each_wait_is_needed() -> None:
    """Without any one of the barriers and waits, a race is found or a result is wrong."""
    source = emitted(PLAIN, "decode", ARCH)
    places = list(SYNCHRONIZATION.finditer(source.text))
    kernels = [compile_text(PLAIN, "decode", removable(source, places), seed, ARCH) for seed in (0, 5)]
    problems = [solved(PLAIN, Shape(1, 64, 1, 1, kv_len)) for kv_len in (400, 330)]

    def finding() -> str:
        return first_finding(partial(is_right, kernel, *problem) for problem in problems for kernel in kernels)

    assert unnoticed(source, places, kernels[0].kernel.library, finding) == []
