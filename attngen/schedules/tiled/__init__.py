"""The schedule `tiled`, as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule, any_types
from attngen.schedules.tiled import plan, shown
from attngen.schedules.tiled.context import Tiled

TILED = Schedule(
    name="tiled",
    keyword="tiled",
    summary="The naive kernels with tiles in shared memory and in registers; tiles that the mask leaves empty are skipped.",
    largest_head=WIDEST_HEAD,
    types=any_types,
    propose=plan.propose,
    tiles=plan.tiles,
    is_fused=False,
    layouts=shown.layouts,
    output_columns=plan.BLOCK_DV,
    emulated_ns=15,
    context=Tiled,
    loops=shown.loops,
)
