"""The schedule `fused_simt` and its backward, each as one object."""

from attngen.plan.plan import EVERY_STORAGE, WITHOUT_CACHES, Schedule
from attngen.schedules.fused_simt import backward_plan, backward_shown, plan, shown
from attngen.schedules.fused_simt.backward_context import FusedSimtBackward
from attngen.schedules.fused_simt.context import FusedSimt

FUSED_SIMT = Schedule(
    name="fused_simt",
    keyword="fused",
    summary="Fused without tensor cores: online softmax, tiles in shared memory as fp32; any storage type, any architecture.",
    propose=plan.propose,
    tiles=plan.tiles,
    storages=EVERY_STORAGE,
    context=FusedSimt,
    loops=shown.loops,
    timeline=shown.timeline,
)

FUSED_SIMT_BACKWARD = Schedule(
    name="fused_simt_backward",
    keyword="fused",
    direction="backward",
    summary="Gradients in O(S) memory without tensor cores: weights recomputed from lse, blocks own keys, then rows.",
    propose=backward_plan.propose,
    tiles=backward_plan.tiles,
    storages=WITHOUT_CACHES,
    context=FusedSimtBackward,
    loops=backward_shown.loops,
    timeline=backward_shown.timeline,
)
