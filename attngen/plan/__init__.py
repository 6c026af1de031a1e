"""How: architectures, plans with their reasons, tile classification. `choose(spec, arch)` gives the plan."""

from attngen.plan.arch import ARCHES, DEFAULT_ARCH, Arch, Feature, find_arch
from attngen.plan.choose import SCHEDULES, candidates, choose, default_arch, depends_on_sizes, plans_for, rungs_for
from attngen.plan.plan import Decision, Plan, PlanRefusal, SharedBuffer
from attngen.plan.problem import Problem

__all__ = [
    "ARCHES",
    "DEFAULT_ARCH",
    "SCHEDULES",
    "Arch",
    "Decision",
    "Feature",
    "Plan",
    "PlanRefusal",
    "Problem",
    "SharedBuffer",
    "candidates",
    "choose",
    "default_arch",
    "depends_on_sizes",
    "find_arch",
    "plans_for",
    "rungs_for",
]
