"""The schedule `tiled` and its backward, each as one object."""

from attngen.plan.plan import EVERY_STORAGE, WITHOUT_CACHES, Schedule
from attngen.schedules.naive import backward_shown as naive
from attngen.schedules.tiled import backward_plan, backward_shown, plan, shown
from attngen.schedules.tiled.backward_context import TiledBackward
from attngen.schedules.tiled.context import Tiled

TILED = Schedule(
    name="tiled",
    keyword="tiled",
    summary="The naive kernels with tiles in shared memory and in registers; tiles that the mask leaves empty are skipped.",
    propose=plan.propose,
    tiles=plan.tiles,
    is_fused=False,
    layouts=shown.layouts,
    storages=EVERY_STORAGE,
    context=Tiled,
    loops=shown.loops,
    timeline=shown.timeline,
)

TILED_BACKWARD = Schedule(
    name="tiled_backward",
    keyword="tiled",
    direction="backward",
    summary="The naive backward's kernels with tiles in shared memory and in registers; empty tiles are skipped.",
    propose=backward_plan.propose,
    is_fused=False,
    storages=WITHOUT_CACHES,
    context=TiledBackward,
    loops=backward_shown.loops,
    timeline=naive.timeline,
)
