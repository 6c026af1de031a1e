"""The schedules: each a package with its planning, its emission context and what pages show of it, as one `Schedule` object."""

from attngen.schedules.choose import SCHEDULES, candidates, choose, default_arch, parts_of, plans_for, schedules_for, tuned_plan

__all__ = ["SCHEDULES", "candidates", "choose", "default_arch", "parts_of", "plans_for", "schedules_for", "tuned_plan"]
