"""How: architectures, plans with their reasons, mask bounds: what all schedules share."""

from attngen.plan.arch import ARCHES, DEFAULT_ARCH, Arch, Feature, find_arch
from attngen.plan.plan import Decision, Plan, PlanRefusal, Schedule
from attngen.plan.problem import Problem
from attngen.plan.shared_memory import SharedBuffer
from attngen.plan.tile import Tile

__all__ = [
    "ARCHES",
    "DEFAULT_ARCH",
    "Arch",
    "Decision",
    "Feature",
    "Plan",
    "PlanRefusal",
    "Problem",
    "Schedule",
    "SharedBuffer",
    "Tile",
    "find_arch",
]
