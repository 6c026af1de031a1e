"""The backward of the schedule `fused_simt`, as one object."""

from attngen.plan.plan import Schedule
from attngen.schedules.fused_simt import backward_plan, backward_shown
from attngen.schedules.fused_simt.backward_context import FusedSimtBackward

FUSED_SIMT_BACKWARD = Schedule(
    name="fused_simt_backward",
    keyword="fused",
    direction="backward",
    summary="Gradients in O(S) memory without tensor cores: weights recomputed from lse, blocks own keys, then rows.",
    in_return="products on the ordinary arithmetic units",
    propose=backward_plan.propose,
    tiles=backward_plan.tiles,
    emulated_ns=30,
    context=FusedSimtBackward,
    loops=backward_shown.loops,
)
