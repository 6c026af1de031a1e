"""The names of schedules in `kernel` statements: for all that names a schedule before, or without, planning by one.

`attngen.schedules` has the schedules themselves, and everything else that is known of them. The language and the command line
know the names from here, since importing schedules takes most of the time that `attngen build` has.
"""

from __future__ import annotations

from typing import Literal, get_args

ScheduleName = Literal["auto", "naive", "tiled", "fused", "wgmma", "hopper", "decode"]

# "auto" leaves the choice to the planner.
SCHEDULE_NAMES: tuple[ScheduleName, ...] = tuple(name for name in get_args(ScheduleName) if name != "auto")
PORTABLE_SCHEDULES: tuple[ScheduleName, ...] = ("naive", "tiled", "fused")  # for any spec, on every architecture
EXAMPLE: ScheduleName = "fused"  # what help writes if a schedule has to be named
