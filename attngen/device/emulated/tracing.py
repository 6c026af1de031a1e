"""What a traced launch did, by statement and by step: runtime/trace.cpp as plain values.

An *access site* is a statement of the generated file, in the calls that it is in, with the buffer that it accesses. A warp
executes it once for each n-th execution by its lanes between two meetings of the warp (a block barrier, or anything that all
lanes do together). Lanes of a warp that have no n-th execution are *idle*: inactive at a branch, or ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attngen.device.emulated.buffers import NamedBuffer

LANES = 32
CALLS = 24  # of runtime/trace.hpp
# What each lane does by itself; the others are done by all lanes together, or by one thread for many.
BY_LANE = ("load", "store", "atomic", "cp.async")


@dataclass(frozen=True, slots=True)
class Watch:
    """Whose steps are wanted: at most `limit` a launch of each of `threads` of block `block`, both linear."""

    block: int = 0
    threads: tuple[int, ...] = (0,)
    limit: int = 100


NOBODY = Watch(threads=(), limit=0)


@dataclass(frozen=True, slots=True)
class Call:
    """A line of the generated file; `primitive`: of a function that is written in PTX."""

    line: int
    text: str
    primitive: bool = False


@dataclass(frozen=True, slots=True)
class AccessSite:
    """One access site, or (with `buffer` None) a statement at which threads meet.

    `calls` are the statement and the calls that it is in, innermost first. `wavefronts` are what its executions take of shared
    memory, `phases` what they would take without bank conflicts; `degree` is the most wavefronts of one phase. `sectors` are
    the 32 bytes of global memory that executions touch, each counted once an execution.
    """

    kernel: str
    what: str
    writes: bool
    buffer: NamedBuffer | None
    calls: tuple[Call, ...]
    executions: int
    lanes: int
    bytes: int
    phases: int
    wavefronts: int
    sectors: int
    degree: int
    width: int

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts add."""
        return self.wavefronts - self.phases

    @property
    def counts_lanes(self) -> bool:
        """Whether lanes that take no part are idle: not at a cp.async's reads, where they copy zeros."""
        return self.what in BY_LANE and (self.writes or self.what != "cp.async")

    @property
    def idle_lanes(self) -> int:
        """Lanes that take no part, over all executions."""
        return LANES * self.executions - self.lanes if self.counts_lanes else 0

    @property
    def place(self) -> Call:
        """The line to name: that of the statement, or where its primitive is called."""
        return next((call for call in self.calls if not call.primitive), Call(0, ""))

    @property
    def callers(self) -> tuple[Call, ...]:
        """The calls that `place` is in, innermost first."""
        outside = [call for call in self.calls if not call.primitive]
        return tuple(outside[1:])


@dataclass(frozen=True, slots=True)
class Step:
    """What one thread did at one time: `phase` counts the block barriers before it, `epoch` the meetings of its warp, `order`
    its own steps since; `at` is its place among the steps of all watched threads, as the emulated device ran them. `offset`
    into the buffer and `width` are in bytes; `value` is what was read or written, if it is known."""

    site: AccessSite
    block: int
    thread: int
    phase: int
    epoch: int
    order: int
    offset: int
    width: int
    value: bytes | None
    at: int = 0


@dataclass(frozen=True, slots=True)
class Traced:
    """One call: its sites in the order in which they were first executed, and the steps that were watched, in the order
    kernel, phase, warp, and the lanes of a warp in step."""

    sites: tuple[AccessSite, ...]
    steps: tuple[Step, ...]


class _Site(ctypes.Structure):
    """`Site` of runtime/trace.hpp."""

    _fields_ = (
        ("calls", ctypes.c_uint64 * CALLS),
        ("what", ctypes.c_char_p),
        ("launch", ctypes.c_int),
        ("statement", ctypes.c_int),
        ("write", ctypes.c_int),
        ("buffer", ctypes.c_int),
        ("executions", ctypes.c_uint64),
        ("lanes", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("phases", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("degree", ctypes.c_int),
        ("width", ctypes.c_int),
    )


class _Step(ctypes.Structure):
    """`Step` of runtime/trace.hpp."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("block", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("phase", ctypes.c_int),
        ("epoch", ctypes.c_int),
        ("order", ctypes.c_int),
        ("bytes", ctypes.c_int),
        ("has_value", ctypes.c_int),
        ("offset", ctypes.c_uint64),
        ("value", ctypes.c_ubyte * 16),
    )


class _Buffer(ctypes.Structure):
    """`Buffer` of runtime/trace.hpp."""

    _fields_ = (
        ("tensor", ctypes.c_int),
        ("is_static", ctypes.c_int),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


def begin(library: ctypes.CDLL, first: bool, buffers: Sequence[NamedBuffer], watch: Watch) -> None:
    """Say what to trace of the next launch."""
    table = (_Buffer * len(buffers))(*(_Buffer(b.tensor, b.is_static, b.offset, b.bytes) for b in buffers))
    watched = bytearray(max(watch.threads, default=-1) + 1)
    for thread in watch.threads:
        watched[thread] = 1
    threads = (ctypes.c_ubyte * max(1, len(watched))).from_buffer_copy(bytes(watched) or b"\0")
    library.emulator_trace(int(first), table, len(buffers), watch.block, threads, len(watched), watch.limit)


LinesOf = Callable[[Sequence[Sequence[int]]], Sequence[tuple[Call, ...]]]


def collect(
    library: ctypes.CDLL, kernels: Sequence[str], buffers: Sequence[Sequence[NamedBuffer]], lines_of: LinesOf
) -> Traced:
    """What the launches of a call have done. `kernels` and `buffers` are those of each launch; `lines_of` gives the lines of
    each list of addresses of the library."""
    sites, steps = ctypes.POINTER(_Site)(), ctypes.POINTER(_Step)()
    site_count, step_count = ctypes.c_int(), ctypes.c_int()
    library.emulator_traced(*map(ctypes.byref, (sites, site_count, steps, step_count)))
    raw = sites[: site_count.value]
    calls = lines_of([[address for address in s.calls if address] for s in raw])
    found = [_site(s, kernels[s.launch], buffers[s.launch], at) for s, at in zip(raw, calls, strict=True)]
    order = [s.launch for s in raw]
    watched = [(order[s.site], _step(s, found[s.site], at)) for at, s in enumerate(steps[: step_count.value])]
    watched.sort(key=lambda e: (e[0], e[1].phase, e[1].thread // LANES, e[1].epoch, e[1].order, e[1].thread))
    first_executed = sorted(zip(raw, found, strict=True), key=lambda pair: pair[0].statement)
    return Traced(_merged([s for _, s in first_executed if s.executions]), tuple(step for _, step in watched))


def _site(s: Any, kernel: str, buffers: Sequence[NamedBuffer], calls: tuple[Call, ...]) -> AccessSite:
    buffer = buffers[s.buffer] if s.buffer >= 0 else None
    what = s.what.decode().removeprefix("the ")
    numbers = (s.executions, s.lanes, s.bytes, s.phases, s.wavefronts, s.sectors, s.degree, s.width)
    return AccessSite(kernel, what, bool(s.write), buffer, calls, *numbers)


def _step(s: Any, site: AccessSite, at: int) -> Step:
    value = bytes(s.value[: s.bytes]) if s.has_value else None
    return Step(site, s.block, s.thread, s.phase, s.epoch, s.order, s.offset, s.bytes, value, at)


def _merged(sites: Sequence[AccessSite]) -> tuple[AccessSite, ...]:
    """Those that the host compiler made several of, as one."""
    whole: dict[tuple[Any, ...], AccessSite] = {}
    for s in sites:
        key = (s.kernel, s.what, s.writes, s.buffer, s.calls, s.width)
        have = whole.get(key)
        whole[key] = s if have is None else _sum(have, s)
    return tuple(whole.values())


def _sum(a: AccessSite, b: AccessSite) -> AccessSite:
    added = ("executions", "lanes", "bytes", "phases", "wavefronts", "sectors")
    sums: dict[str, int] = {name: getattr(a, name) + getattr(b, name) for name in added}
    return replace(a, degree=max(a.degree, b.degree), **sums)  # type: ignore[arg-type]
