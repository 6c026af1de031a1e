"""`kernel` statements: their effect on plans, and on the plan of another schedule that a call names."""

from __future__ import annotations

import pytest

import attngen
from attngen.keywords import ScheduleName
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.plan import PlanRefusal
from attngen.schedules import choose


def tile(kernel: ScheduleName, schedule: str | None, arch: str) -> tuple[int, int]:
    spec = attngen.define(head_dim=128, dtype="bf16", mask="causal", kernel=kernel, tile=(64, 32))
    plan = choose(spec, ARCHES[arch], schedule)
    return plan.block_q, plan.block_kv


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_tile_without_a_schedule_is_for_the_one_that_is_asked_for(arch: str) -> None:
    """The tile is for the named schedule, also if "auto" alone would select another one."""
    assert tile("auto", "fused", arch) == (64, 32)


def test_a_tile_of_a_schedule_is_for_no_other() -> None:
    assert tile("fused", None, "sm_90a") == tile("fused", "fused", "sm_90a") == (64, 32)
    assert tile("fused", "wgmma", "sm_90a") != (64, 32)


@pytest.mark.parametrize("schedule", ["naive", "tiled"])
def test_schedules_of_several_kernels_take_no_tile_from_auto(schedule: str) -> None:
    assert tile("auto", schedule, "sm_80") != (64, 32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
@pytest.mark.parametrize("head_dim", [136, 256])
def test_a_block_has_a_thread_for_each_chunk_of_a_row(head_dim: int, arch: str) -> None:
    """A block copies whole rows at once: one warp is too small for the 36 or 64 chunks of a row."""
    spec = attngen.define(head_dim=head_dim, dtype="fp32", kernel="fused", tile=(16, 16), warps=1)
    with pytest.raises(PlanRefusal, match=r"needs (36|64) threads, and a block of this tile has 32"):
        choose(spec, ARCHES[arch])


@pytest.mark.parametrize("schedule", ["auto", "naive", "tiled", "fused", "wgmma", "hopper"])
@pytest.mark.parametrize("kernel", ["auto", "fused", "wgmma"])
def test_the_text_that_torch_s_operator_keeps_has_the_same_plan(kernel: ScheduleName, schedule: str) -> None:
    description = pytest.importorskip("attngen.torch.description")
    spec = attngen.define(head_dim=128, dtype="bf16", mask="causal", kernel=kernel, tile=(128, 128))
    said = load_text(description.fixed_text(spec, schedule))[0]
    plans = choose(spec, ARCHES["sm_90a"], schedule), choose(said, ARCHES["sm_90a"])
    assert len({(p.keyword, p.block_q, p.block_kv, p.stages, p.warps) for p in plans}) == 1


def test_a_head_that_no_register_holds_is_refused_where_it_stands() -> None:
    spec = attngen.define(head_dim=64, head_dim_v=264, dtype="bf16")
    with pytest.raises(PlanRefusal, match=r"(?s)`head_dim`.*at most 256.*naive, tiled") as refused:
        choose(spec, ARCHES["sm_90a"], "wgmma")
    assert refused.value.diagnostics[0].statement == "head_dim"


@pytest.mark.parametrize("wanted", [(), ("q", "k", "v")])
@pytest.mark.parametrize(("arch", "taken"), [("sm_90a", "hopper"), ("sm_80", "fused"), ("sm_75", "tiled")])
def test_auto_takes_a_schedule_that_has_such_heads(wanted: tuple[str, ...], arch: str, taken: str) -> None:
    spec = attngen.define(head_dim=264, dtype="bf16")
    assert choose(spec, ARCHES[arch], wanted=wanted).keyword == taken
    with pytest.raises(PlanRefusal, match=r"(?s)`head_dim`.*at most 576.*smaller head size"):
        choose(attngen.define(head_dim=584, dtype="bf16"), ARCHES["sm_90a"], wanted=wanted)
