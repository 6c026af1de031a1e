"""The schedule `wgmma`, as one object."""

from attngen.plan.plan import Schedule
from attngen.plan.prepared import converted_types
from attngen.plan.register_table import Measured
from attngen.schedules.parts import wgmma
from attngen.schedules.wgmma import plan, registers, shown
from attngen.schedules.wgmma.context import FusedWgmma

WGMMA = Schedule(
    name="wgmma",
    keyword="wgmma",
    summary="The step between fused and hopper: TMA copies the tiles and warpgroups multiply by wgmma; no warp specialization.",
    propose=plan.propose,
    why_not=wgmma.why_not,
    types=converted_types,
    converts_keys=True,
    needs=wgmma.NEEDED,
    tiles=plan.tiles,
    measured=Measured(
        registers.FAMILIES,
        lambda family: registers.KEYS,
        registers.specs_of,
        plan.of_family,
        ("sm_90a",),
        registers.as_spilled,
    ),
    on_tensor_cores=True,
    by_tma=True,
    emulated_ns=7,
    context=FusedWgmma,
    loops=shown.loops,
)
