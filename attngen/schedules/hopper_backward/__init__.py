"""The backward of the schedule `hopper`, as one object."""

from attngen.plan.plan import Schedule
from attngen.schedules.hopper_backward import plan, shown
from attngen.schedules.hopper_backward.context import HopperBackward

HOPPER_BACKWARD = Schedule(
    name="hopper_backward",
    keyword="hopper",
    direction="backward",
    summary="Gradients by TMA and wgmma: a kernel whose blocks hold keys and one whose blocks hold rows, or adds up dQ.",
    propose=plan.propose,
    why_not=plan.why_not,
    tiles=plan.tiles,
    heads_side_by_side=plan.heads_side_by_side,
    is_faster_in_order=plan.is_faster_in_order,
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    listed_tiles=plan.FOUND,
    emulated_ns=17.5,
    context=HopperBackward,
    loops=shown.loops,
)
