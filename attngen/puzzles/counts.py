"""What is counted of a launch, and `Target`: how much of it a medal allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from attngen.device.emulated.device import Counters
from attngen.device.emulated.tracing import LANES, AccessSite
from attngen.inspect.tracing import WARPGROUP, totals

Medal: TypeAlias = Literal["", "bronze", "silver", "gold"]
MEDALS: tuple[Medal, ...] = ("", "bronze", "silver", "gold")


@dataclass(frozen=True, slots=True)
class Count:
    """One number of a launch. `of_site` is the part of one statement, if statements have parts of it."""

    words: str
    of_launch: Callable[[Counters, Sequence[AccessSite]], int]
    of_site: Callable[[AccessSite], int] | None = None


def _sites(words: str, of_site: Callable[[AccessSite], int]) -> Count:
    return Count(words, lambda counters, sites: sum(map(of_site, sites)), of_site)


def _instructions(words: str, opcode: str, threads: int = 1) -> Count:
    """Executions of the PTX instructions that `opcode` matches, each by so many threads together."""

    def number(counters: Counters, sites: Sequence[AccessSite]) -> int:
        return sum(n for name, n in counters.instructions.items() if re.match(opcode, name)) // threads

    return Count(words, number)


def _in_global(site: AccessSite) -> bool:
    return site.buffer is not None and not site.buffer.is_shared


COUNTS: Mapping[str, Count] = {
    "read": Count(
        "global memory read, bytes",
        lambda counters, sites: sum(counters.bytes_read.values()),
        lambda s: s.bytes if _in_global(s) and not s.writes else 0,
    ),
    "written": Count(
        "global memory written, bytes",
        lambda counters, sites: sum(counters.bytes_written.values()),
        lambda s: s.bytes if _in_global(s) and s.writes else 0,
    ),
    "sectors": _sites("sectors of 32 bytes of global memory", lambda s: s.sectors),
    "requests": _sites("accesses of warps to global memory", lambda s: s.executions if _in_global(s) else 0),
    "shared_read": Count(
        "shared memory read, bytes",
        lambda counters, sites: counters.shared_bytes_read,
        lambda s: s.bytes if s.buffer is not None and s.buffer.is_shared and not s.writes else 0,
    ),
    "wavefronts": _sites("wavefronts of shared memory", lambda s: s.wavefronts),
    "conflicts": _sites("bank conflicts", lambda s: s.conflicts),
    "barriers": Count("barriers", lambda counters, sites: totals(counters, sites).barriers),
    "mma": _instructions("mma instructions of warps", r"mma\.", LANES),
    "wgmma_async": _instructions("wgmma instructions of warpgroups", r"wgmma\.mma", WARPGROUP),
    "ldmatrix": _instructions("ldmatrix instructions of warps", r"ldmatrix", LANES),
    "cp_async": _instructions("cp.async copies of threads", r"cp\.async\.c[ag]\."),
    "tma": _instructions("TMA copies", r"cp\.async\.bulk\.(tensor|shared)"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The number of `count`, a key of COUNTS, that silver and gold allow: at most so many, or at least, to show that an
    instruction is used. `silver` None: any number."""

    count: str
    gold: int
    silver: int | None = None
    at_least: bool = False

    @property
    def words(self) -> str:
        return COUNTS[self.count].words

    def limit(self, medal: Medal) -> int | None:
        return {"silver": self.silver, "gold": self.gold}.get(medal)

    def allows(self, counted: int, medal: Medal) -> bool:
        """Whether the count is good enough for a medal."""
        limit = self.limit(medal)
        return limit is None or (counted >= limit if self.at_least else counted <= limit)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a count that a statement has of one array of global memory, or (`array` empty) of all shared memory.
    `needed`: what a solution that reaches gold has of this array, by all its statements; None if it is not known."""

    line: int
    number: int
    array: str = ""
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """A target, the number that was counted, and the parts of it by statements, the largest first."""

    target: Target
    number: int
    lines: tuple[Part, ...]

    def beside(self, gold: Counted) -> Counted:
        """With the parts of arrays of which there is more than in `gold`, if there are any."""
        own, needed = self._of_arrays(), gold._of_arrays()
        parts = [replace(p, needed=needed.get(p.array, 0)) if p.array else p for p in self.lines]
        excess = {name: max(0, number - needed.get(name, 0)) for name, number in own.items()}
        ordered = sorted(parts, key=lambda p: (-excess.get(p.array, 0), -p.number))
        return replace(self, lines=tuple(p for p in ordered if excess.get(p.array)) or self.lines)

    def _of_arrays(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self.lines:
            if part.array:
                found[part.array] = found.get(part.array, 0) + part.number
        return found


def count(target: Target, counters: Counters, sites: Sequence[AccessSite]) -> Counted:
    """The count of a launch for a target."""
    one = COUNTS[target.count]
    parts: dict[tuple[int, str], int] = {}
    for site in sites if one.of_site is not None else ():
        assert one.of_site is not None
        array = site.buffer.name if site.buffer is not None and _in_global(site) else ""
        parts[site.place.line, array] = parts.get((site.place.line, array), 0) + one.of_site(site)
    found = [Part(line, n, array) for (line, array), n in parts.items() if n and line]
    return Counted(target, one.of_launch(counters, sites), tuple(sorted(found, key=lambda part: -part.number)))


def medal_of(counted: Sequence[Counted]) -> Medal:
    """The best medal that all counts allow."""
    good = (medal for medal in reversed(MEDALS) if all(c.target.allows(c.number, medal) for c in counted))
    return next(good)
