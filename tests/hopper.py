"""The schedules that only architectures with TMA and wgmma have."""

from attngen.keywords import SCHEDULE_NAMES
from attngen.schedules import default_arch

HOPPER_SCHEDULES = tuple(name for name in SCHEDULE_NAMES if default_arch(name) == "sm_90a")
