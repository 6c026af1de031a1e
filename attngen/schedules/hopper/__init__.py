"""The schedule `hopper`, as one object."""

from attngen.plan.plan import Schedule
from attngen.schedules.hopper import needs, plan, shown
from attngen.schedules.hopper.context import Hopper
from attngen.schedules.parts import wgmma

HOPPER = Schedule(
    name="hopper",
    keyword="hopper",
    summary="A persistent kernel with warp specialization: a producer copies by TMA, two to four consumers multiply by wgmma.",
    propose=plan.propose,
    why_not=wgmma.why_not,
    needs=wgmma.NEEDED,
    tiles=plan.tiles,
    by_lengths=plan.by_lengths,
    propose_tile=plan.with_tile,
    holds_q=lambda facts, arch, tile: needs.may_hold_q(facts, tile),
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    emulated_ns=7,
    context=Hopper,
    loops=shown.loops,
)
