"""Shared memory: a buffer is as large as its description says, and overlaps no other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from attngen import define
from attngen.inspect.coordinates import planned
from attngen.plan import ARCHES, Plan, PlanRefusal, choose, hopper
from attngen.spec.attention import HOPPER_RUNGS, Schedule
from tests import tiers
from tests.harness import SPECS, shipped

SIZES = (8, 64, 72, 128, 136, 192, 200, 256)


def check(plan: Plan) -> None:
    for buffer in plan.buffers:
        layout = planned(buffer.what)
        assert layout is not None, buffer
        assert layout.element_bytes * prod(layout.shape) == buffer.bytes, buffer
    assert all(one.offset + one.bytes <= other.offset for one, other in pairwise(plan.buffers))
    assert plan.shared_bytes <= plan.arch.shared_per_block


@pytest.mark.parametrize("rung", ["fused", *HOPPER_RUNGS])
@pytest.mark.parametrize("name", tiers.cases(SPECS, quick=["gpt2", "packed_documents", "unequal_heads"]))
def test_of_shipped_specs(name: str, rung: str) -> None:
    planned_for = 0
    for arch in ARCHES.values():
        try:
            check(choose(shipped(name), arch, rung))
        except PlanRefusal:
            continue
        planned_for += 1
    assert planned_for or (rung in HOPPER_RUNGS and not hopper.suits(shipped(name), ARCHES["sm_90a"]))


@pytest.mark.parametrize("head_dim_v", tiers.cases(SIZES, quick=[64, 200]))
@pytest.mark.parametrize("head_dim", tiers.cases(SIZES, quick=[72, 256]))
def test_of_every_tile_of_hopper(head_dim: int, head_dim_v: int) -> None:
    """A warp's rows of the output lie in a slab of 64 columns, or in several at once where there is room for them."""
    spec = define(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim_v, mask="causal")
    arch = ARCHES["sm_90a"]
    for tile in hopper.tiles(spec, arch):
        asked = Schedule("hopper", block_q=tile.block_q, block_kv=tile.block_kv, stages=tile.stages, warps=tile.warps)
        plan = choose(replace(spec, schedule=asked), arch, "hopper")
        assert (plan.block_q, plan.block_kv, plan.stages) == (tile.block_q, tile.block_kv, tile.stages)
        check(plan)
        assert plan.roles is not None
        (output,) = [b for b in plan.buffers if b.name == "O"]
        assert output.bytes == plan.roles.output_slabs * tile.block_q * 2 * hopper.SLAB
