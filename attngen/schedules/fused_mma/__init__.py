"""The schedule `fused_mma`, as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule
from attngen.plan.prepared import converted_types
from attngen.plan.register_table import PORTABLE, Measured
from attngen.schedules.fused_mma import plan, registers, shown
from attngen.schedules.fused_mma.context import FusedMma
from attngen.schedules.parts.mma import NEEDED

FUSED_MMA = Schedule(
    name="fused_mma",
    keyword="fused",
    summary="Fused on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async; fp16, bf16, and fp32 as split operands.",
    propose=plan.propose,
    largest_head=WIDEST_HEAD,
    why_not=plan.why_not,
    types=converted_types,
    converts_keys=True,
    scales_heads=True,
    needs=NEEDED,
    tiles=plan.tiles,
    holds_q=registers.may_hold_q,
    measured=Measured(
        registers.FAMILIES, registers.keys_of, registers.specs_of, plan.of_family, PORTABLE, registers.as_spilled
    ),
    on_tensor_cores=True,
    emulated_ns=12,
    context=FusedMma,
    loops=shown.loops,
)
