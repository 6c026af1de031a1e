"""Ranges of a captured vector's tiles that serve rows and keys, where a tile of rows is two tiles of keys."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.plan import ARCHES
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from tests import tiers
from tests.harness import run

KERNELS = [
    ("hopper", "sm_90a", "bf16", 256),
    ("wgmma", "sm_90a", "bf16", 256),
    ("fused", "sm_90a", "bf16", 128),
    ("fused", "sm_80", "bf16", 112),
    ("fused", "sm_80", "fp32", 128),
    ("fused", "sm_75", "fp32", 64),
]


@pytest.mark.parametrize("ends", tiers.cases([[30, 64, 128, 150], [100], []], quick=[[30, 64, 128, 150]]))
@pytest.mark.parametrize(
    "mask", tiers.cases(["causal and same_document(ids)", "same_document(ids)"], quick=["same_document(ids)"])
)
@pytest.mark.parametrize(
    ("schedule", "arch", "dtype", "head_dim"), tiers.cases(KERNELS, quick=[KERNELS[0], KERNELS[3]], one_of=3)
)
def test_documents(schedule: str, arch: str, dtype: str, head_dim: int, mask: str, ends: list[int]) -> None:
    """Of each batch other documents; the last block of rows has one tile beside it, or two."""
    spec = attngen.define(dtype=dtype, head_dim=head_dim, mask=mask, inputs={"ids": ("int32", ("batch", "kv_len"))})
    plan = choose(spec, ARCHES[arch], schedule)
    assert plan.block_q == 2 * plan.block_kv
    assert [s.name for s in plan.bounds.spans] == ["ids.k"]
    for q_len, kv_len in ((plan.block_kv, plan.block_kv), (193, 193), (200, 330)):
        problem = sample(spec, Shape(2, 1, 1, q_len, kv_len))
        documents = [np.searchsorted(np.array(ends) + 7 * b, np.arange(kv_len), side="right") for b in range(2)]
        problem.inputs["ids"] = np.stack(documents).astype(np.int32)
        assert run(spec, schedule, problem, arch=arch).passed, (q_len, kv_len)
