"""The schedules: each a package with its planning, its emission context and what pages show of it, as one `Schedule` object."""

from attngen.schedules.choose import choice_of, choose, parts_of, plans_for
from attngen.schedules.decode.plan import MOST_ROWS as FEW_ROWS  # up to which `auto` splits the keys of a sequence
from attngen.schedules.one_plan import overridden
from attngen.schedules.registry import SCHEDULES, UNFUSED, default_arch, schedules_for
from attngen.schedules.tuning import alternatives, candidates, request_of, title_of, tuned_plan

__all__ = [
    "FEW_ROWS",
    "SCHEDULES",
    "UNFUSED",
    "alternatives",
    "candidates",
    "choice_of",
    "choose",
    "default_arch",
    "overridden",
    "parts_of",
    "plans_for",
    "request_of",
    "schedules_for",
    "title_of",
    "tuned_plan",
]
