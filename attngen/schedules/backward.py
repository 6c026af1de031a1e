"""The schedules of backwards."""

from attngen.plan.plan import Schedule
from attngen.schedules.fused_mma.backward import FUSED_MMA_BACKWARD
from attngen.schedules.fused_simt.backward import FUSED_SIMT_BACKWARD
from attngen.schedules.hopper_backward import HOPPER_BACKWARD, HOPPER_WIDE_BACKWARD
from attngen.schedules.naive.backward import NAIVE_BACKWARD
from attngen.schedules.tiled.backward import TILED_BACKWARD

# In order of preference under one keyword.
BACKWARD_SCHEDULES: tuple[Schedule, ...] = (
    NAIVE_BACKWARD,
    TILED_BACKWARD,
    FUSED_MMA_BACKWARD,
    FUSED_SIMT_BACKWARD,
    HOPPER_BACKWARD,
    HOPPER_WIDE_BACKWARD,
)
