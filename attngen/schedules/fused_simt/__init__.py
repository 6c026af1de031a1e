"""The schedule `fused_simt`, as one object."""

from attngen.plan.plan import Schedule
from attngen.plan.prepared import converted_types
from attngen.schedules.fused_simt import plan, shown
from attngen.schedules.fused_simt.context import FusedSimt

FUSED_SIMT = Schedule(
    name="fused_simt",
    keyword="fused",
    summary="Fused without tensor cores: online softmax, tiles in shared memory as fp32; any storage type, any architecture.",
    in_return="products on the ordinary arithmetic units",
    propose=plan.propose,
    types=converted_types,
    converts_keys=True,
    tiles=plan.tiles,
    emulated_ns=12,
    context=FusedSimt,
    loops=shown.loops,
)
