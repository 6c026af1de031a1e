"""Shared memory: no buffer overlaps another, and all fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from attngen import define
from attngen.plan import ARCHES, Plan, PlanRefusal
from attngen.plan.facts import facts_of
from attngen.schedules import choose, schedules_for
from attngen.schedules.hopper import plan as hopper
from attngen.schedules.parts.wgmma import SLAB
from attngen.spec.attention import KernelRequest
from tests import tiers
from tests.harness import SHIPPED, shipped
from tests.hopper import HOPPER_SCHEDULES

SIZES = (8, 64, 72, 128, 136, 192, 200, 256)


def check(plan: Plan) -> None:
    assert all(one.offset + one.bytes <= other.offset for one, other in pairwise(plan.buffers))
    assert plan.shared_bytes <= plan.arch.shared_per_block


@pytest.mark.parametrize("schedule", ["fused", *HOPPER_SCHEDULES])
@pytest.mark.parametrize("name", tiers.cases(SHIPPED, quick=["gpt2", "packed_documents", "unequal_heads"]))
def test_of_shipped_specs(name: str, schedule: str) -> None:
    planned_for = 0
    for arch in ARCHES.values():
        try:
            check(choose(shipped(name), arch, schedule))
        except PlanRefusal:
            continue
        planned_for += 1
    assert planned_for or schedule not in schedules_for(shipped(name), ARCHES["sm_90a"])


@pytest.mark.parametrize("head_dim_v", tiers.cases(SIZES, quick=[64, 200]))
@pytest.mark.parametrize("head_dim", tiers.cases(SIZES, quick=[72, 256]))
def test_of_every_tile_of_hopper(head_dim: int, head_dim_v: int) -> None:
    """A warp's rows of the output are stored in one slab of 64 columns, or in several at once if they fit."""
    spec = define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal")
    arch = ARCHES["sm_90a"]
    for tile in hopper.tiles(facts_of(spec), arch):
        request = KernelRequest("hopper", block_q=tile.block_q, block_kv=tile.block_kv, stages=tile.stages, warps=tile.warps)
        plan = choose(replace(spec, kernel=request), arch, "hopper")
        assert (plan.block_q, plan.block_kv, plan.stages) == (tile.block_q, tile.block_kv, tile.stages)
        check(plan)
        (output,) = [b for b in plan.buffers if b.name == "O"]
        assert output.bytes == plan.own.output_slabs * tile.block_q * 2 * SLAB
