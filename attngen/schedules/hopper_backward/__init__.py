"""The backward of the schedule `hopper`: an object for heads of up to 256, and one for wider heads."""

from attngen.plan.plan import LARGEST_HEAD, Schedule
from attngen.schedules.hopper_backward import buffers, plan, shown, wide_plan, wide_shown
from attngen.schedules.hopper_backward.context import HopperBackward
from attngen.schedules.hopper_backward.wide_context import HopperWideBackward

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
    listed_tiles=buffers.FOUND,
    emulated_ns=17.5,
    context=HopperBackward,
    loops=shown.loops,
)

HOPPER_WIDE_BACKWARD = Schedule(
    name="hopper_wide_backward",
    keyword="hopper",
    direction="backward",
    summary="hopper's gradients for heads of more than 256: a kernel for each sum, whose columns two consumers divide.",
    propose=wide_plan.propose,
    why_not=wide_plan.why_not,
    largest_head=wide_plan.WIDEST,
    heads_above=LARGEST_HEAD,
    tiles=wide_plan.tiles,
    in_return="dV, dK and dQ have a kernel each",
    on_tensor_cores=True,
    by_tma=True,
    is_warp_specialized=True,
    listed_tiles=buffers.FOUND,
    emulated_ns=17.5,
    context=HopperWideBackward,
    loops=wide_shown.loops,
)
