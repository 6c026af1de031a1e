"""The schedule `fused_mma` and its backward, each as one object."""

from attngen.plan.plan import EVERY_STORAGE, WITHOUT_CACHES, Schedule
from attngen.plan.register_table import PORTABLE, Measured
from attngen.schedules.fused_mma import backward_plan, backward_shown, plan, registers, shown
from attngen.schedules.fused_mma.backward_context import FusedMmaBackward
from attngen.schedules.fused_mma.context import FusedMma

FUSED_MMA = Schedule(
    name="fused_mma",
    keyword="fused",
    summary="Fused on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async; fp16, bf16, and fp32 as split operands.",
    propose=plan.propose,
    why_not=plan.why_not,
    tiles=plan.tiles,
    holds_q=registers.may_hold_q,
    measured=Measured(
        registers.FAMILIES, registers.keys_of, registers.specs_of, plan.of_family, PORTABLE, registers.as_spilled
    ),
    on_tensor_cores=True,
    storages=EVERY_STORAGE,
    context=FusedMma,
    loops=shown.loops,
    timeline=shown.timeline,
)

FUSED_MMA_BACKWARD = Schedule(
    name="fused_mma_backward",
    keyword="fused",
    direction="backward",
    summary="Gradients on tensor cores, sm_80 and later: a kernel that owns keys and one that owns rows, or adds up dQ.",
    propose=backward_plan.propose,
    why_not=backward_plan.why_not,
    tiles=backward_plan.tiles,
    on_tensor_cores=True,
    storages=WITHOUT_CACHES,
    context=FusedMmaBackward,
    loops=backward_shown.loops,
    timeline=backward_shown.timeline,
)
