"""The backward of the schedule `tiled`, as one object."""

from attngen.plan.plan import Schedule
from attngen.schedules.parts.unfused_backward import timeline
from attngen.schedules.tiled import backward_plan, backward_shown
from attngen.schedules.tiled.backward_context import TiledBackward

TILED_BACKWARD = Schedule(
    name="tiled_backward",
    keyword="tiled",
    direction="backward",
    summary="The naive backward's kernels with tiles in shared memory and in registers; empty tiles are skipped.",
    propose=backward_plan.propose,
    is_fused=False,
    context=TiledBackward,
    loops=backward_shown.loops,
    timeline=timeline,
)
