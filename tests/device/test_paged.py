"""Keys and values in pages: every portable schedule reads them where the page table says, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import attngen
from attngen.reference.compare import compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import stored, unpacked
from attngen.spec.attention import AttentionSpec, ScheduleName, Storage
from tests.harness import compiled

Case = tuple[ScheduleName, Storage, int | None]
BOTTOM = attngen.define(dtype="bf16", head_dim=16, mask="causal_bottom_right and q + kv_len - q_len - k < 300", lse=True)


def in_pages(
    spec: AttentionSpec, schedule: ScheduleName, storage: Storage = "paged", page_size: int | None = None
) -> AttentionSpec:
    """`spec` by a schedule, with keys in pages."""
    return replace(spec, kernel=replace(spec.kernel, schedule=schedule, storage=storage, page_size=page_size))


def wrong(spec: AttentionSpec, problem: Sample, rows: list[int] | None, keys: list[int], **how: Any) -> list[Any]:
    """The sequences whose results are not those of the same sequence alone."""
    kernel = compiled(spec, spec.kernel.schedule)
    q_len = problem.q.shape[2]
    rows = rows or [q_len] * len(keys)
    arrays = stored(spec, problem, rows, keys, **how)
    out, lse = kernel(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"), **arrays)
    packed = spec.kernel.is_packed
    outs = unpacked(out, rows, 0) if packed else list(out)
    lses = unpacked(lse, rows, 1) if packed else list(lse)
    found = []
    for b, (n, m) in enumerate(zip(rows, keys, strict=True)):
        alone = Sample(problem.q[b : b + 1, :, :n], problem.k[b : b + 1, :, :m], problem.v[b : b + 1, :, :m], {})
        o = outs[b].swapaxes(0, 1) if packed else outs[b]
        result = compare(o[None], lses[b][None], truth(spec, alone))
        if n and not result.passed:
            found.append((b, n, m, result))
    return found


SCHEDULES: list[Case] = [
    ("decode", "paged", None), ("decode", "paged", 16), ("fused", "paged", None), ("fused", "packed_paged", 128),
    ("naive", "packed_paged", None), ("tiled", "paged", None), ("tiled", "packed_paged", 1),
]  # fmt: skip
KEYS = [0, 1, 16, 17, 300, 64, 5]


QUICK = SCHEDULES[:1]


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in SCHEDULES], ids=str)
def test_sequences_in_pages(case: Case) -> None:
    """Lengths from 0 on, pages of several sizes, rubbish in the table, NaN in the rows that no sequence has."""
    schedule, storage, page_size = case
    spec = in_pages(BOTTOM, schedule, storage, page_size)
    problem = sample(spec, Shape(len(KEYS), 4, 2, 3, 300))
    rows = [3, 1, 0, 2, 3, 3, 1] if spec.kernel.is_packed else None
    for number, size in enumerate((1, 16, 64, 256) if page_size is None else (page_size,)):
        assert wrong(spec, problem, rows, KEYS, page_size=size, heads_inside=number % 2 == 0) == []
