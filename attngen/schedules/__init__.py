"""The schedules: each a package with its planning, its emission context and what pages show of it, as one `Schedule` object."""

from attngen.schedules.choose import choice_of, choose, parts_of, plans_for
from attngen.schedules.registry import SCHEDULES, default_arch, schedules_for
from attngen.schedules.tuning import alternatives, candidates, request_of, title_of, tuned_plan

__all__ = [
    "SCHEDULES",
    "alternatives",
    "candidates",
    "choice_of",
    "choose",
    "default_arch",
    "parts_of",
    "plans_for",
    "request_of",
    "schedules_for",
    "title_of",
    "tuned_plan",
]
