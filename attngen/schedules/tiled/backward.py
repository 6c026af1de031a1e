"""The backward of the schedule `tiled`, as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule
from attngen.schedules.tiled import backward_plan, backward_shown
from attngen.schedules.tiled.backward_context import TiledBackward

TILED_BACKWARD = Schedule(
    name="tiled_backward",
    keyword="tiled",
    direction="backward",
    summary="The naive backward's kernels with tiles in shared memory and in registers; empty tiles are skipped.",
    largest_head=WIDEST_HEAD,
    propose=backward_plan.propose,
    is_fused=False,
    emulated_ns=37.5,
    context=TiledBackward,
    loops=backward_shown.loops,
)
