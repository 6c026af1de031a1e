"""The backward of the schedule `fused_mma`, as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule
from attngen.schedules.fused_mma import backward_plan, backward_shown
from attngen.schedules.fused_mma.backward_context import FusedMmaBackward

FUSED_MMA_BACKWARD = Schedule(
    name="fused_mma_backward",
    keyword="fused",
    direction="backward",
    summary="Gradients on tensor cores, sm_80 and later: a kernel that owns keys and one that owns rows, or adds up dQ.",
    propose=backward_plan.propose,
    largest_head=WIDEST_HEAD,
    why_not=backward_plan.why_not,
    tiles=backward_plan.tiles,
    on_tensor_cores=True,
    emulated_ns=30,
    context=FusedMmaBackward,
    loops=backward_shown.loops,
)
