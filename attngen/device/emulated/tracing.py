"""A traced launch by statement and by step: the tables of runtime/trace.cpp as plain values.

An *access site* is a statement of the generated file, with its enclosing calls and the buffer that it accesses. The n-th
executions by the lanes of a warp since its last convergence (a block barrier, or an operation of all lanes) count as one
execution of the warp. Lanes without an n-th execution are *idle*: inactive at a branch, or ended.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attngen.device.emulated.buffers import NamedBuffer

LANES = 32
CALLS = 24  # as in runtime/trace.hpp
# Accesses of single lanes; the others are made by all lanes together, or by one thread for many.
BY_LANE = ("load", "store", "atomic", "cp.async")


@dataclass(frozen=True, slots=True)
class Watch:
    """The threads whose steps are recorded: `threads` of `block` (linear), at most `limit` steps each per launch. Of these, the
    trace has all, or those that write the buffer called `written`."""

    block: int = 0
    threads: tuple[int, ...] = (0,)
    limit: int = 100
    written: str = ""


NOBODY = Watch(threads=(), limit=0)


@dataclass(frozen=True, slots=True)
class Call:
    """A line of the generated file; `primitive`: in a function written in PTX."""

    line: int
    text: str
    primitive: bool = False


@dataclass(frozen=True, slots=True)
class AccessSite:
    """One access site, or (with `buffer` None) a statement at which threads synchronize."""

    kernel: str
    what: str
    writes: bool
    buffer: NamedBuffer | None
    calls: tuple[Call, ...]  # the statement and its enclosing calls, innermost first
    executions: int
    lanes: int
    bytes: int
    phases: int  # wavefronts without bank conflicts
    wavefronts: int  # wavefronts in shared memory, by its executions
    sectors: int  # pieces of 32 bytes of global memory that executions touch, each counted once per execution
    degree: int  # the largest number of wavefronts of one phase
    width: int

    @property
    def conflicts(self) -> int:
        """Additional wavefronts due to bank conflicts."""
        return self.wavefronts - self.phases

    @property
    def counts_lanes(self) -> bool:
        """Whether inactive lanes count as idle: not for the reads of a cp.async, where they copy zeros."""
        return self.what in BY_LANE and (self.writes or self.what != "cp.async")

    @property
    def idle_lanes(self) -> int:
        """Inactive lanes, summed over all executions."""
        return LANES * self.executions - self.lanes if self.counts_lanes else 0

    @property
    def place(self) -> Call:
        """The line of the statement, or of the call of its primitive."""
        return next((call for call in self.calls if not call.primitive), Call(0, ""))

    @property
    def callers(self) -> tuple[Call, ...]:
        """The calls that enclose `place`, innermost first."""
        outside = [call for call in self.calls if not call.primitive]
        return tuple(outside[1:])


@dataclass(frozen=True, slots=True)
class MbarrierUse:
    """An arrival at an mbarrier, or a wait for it: `buffer` and `offset` (bytes) say which, `phase` how many of its phases have
    ended. `number`: the announced bytes of an arrival, the parity of a wait."""

    buffer: NamedBuffer
    offset: int
    phase: int
    number: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a thread."""

    site: AccessSite
    block: int
    thread: int
    phase: int  # block barriers before it
    epoch: int  # convergences of its warp
    order: int  # its own steps since
    offset: int  # in the buffer, in bytes
    width: int  # bytes
    value: bytes | None  # read or written, if it is known
    at: int = 0  # index among the steps of all watched threads, in the order of the run
    mbarrier: MbarrierUse | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """A call's sites by first execution, and the watched steps by kernel, phase and warp, its lanes in lockstep."""

    sites: tuple[AccessSite, ...]
    steps: tuple[Step, ...]


def ints(names: str) -> list[tuple[str, type[ctypes.c_int]]]:
    """Fields of a C structure of type int."""
    return [(name, ctypes.c_int) for name in names.split()]


def words(names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    """Fields of a C structure of 64 bits."""
    return [(name, ctypes.c_uint64) for name in names.split()]


class _Site(ctypes.Structure):
    """`Site` of runtime/trace.hpp."""

    _fields_ = (
        ("calls", ctypes.c_uint64 * CALLS), ("what", ctypes.c_char_p), *ints("launch statement write buffer"),
        *words("executions lanes bytes phases wavefronts sectors"), *ints("degree width"),
    )  # fmt: skip


class _Step(ctypes.Structure):
    """`Step` of runtime/trace.hpp."""

    _fields_ = (
        *ints("site block thread phase epoch order bytes has_value"), *words("offset"), ("value", ctypes.c_ubyte * 16),
    )  # fmt: skip


class _Buffer(ctypes.Structure):
    """`Buffer` of runtime/trace.hpp."""

    _fields_ = (*ints("tensor is_static"), *words("offset bytes"))


def begin(library: ctypes.CDLL, first: bool, buffers: Sequence[NamedBuffer], watch: Watch) -> None:
    """Sets what to trace in the next launch."""
    table = (_Buffer * len(buffers))(*(_Buffer(b.tensor, b.is_static, b.offset, b.bytes) for b in buffers))
    watched = bytearray(max(watch.threads, default=-1) + 1)
    for thread in watch.threads:
        watched[thread] = 1
    threads = (ctypes.c_ubyte * max(1, len(watched))).from_buffer_copy(bytes(watched) or b"\0")
    library.emulator_trace(int(first), table, len(buffers), watch.block, threads, len(watched), watch.limit)


LinesOf = Callable[[Sequence[Sequence[int]]], Sequence[tuple[Call, ...]]]


def collect(
    library: ctypes.CDLL, kernels: Sequence[str], buffers: Sequence[Sequence[NamedBuffer]], lines_of: LinesOf, written: str = ""
) -> Traced:
    """The sites and steps of a call. `kernels` and `buffers` are those of each launch; `lines_of` returns the lines of each
    list of addresses in the library; `written` as of Watch."""
    sites, steps = ctypes.POINTER(_Site)(), ctypes.POINTER(_Step)()
    site_count, step_count = ctypes.c_int(), ctypes.c_int()
    library.emulator_traced(*map(ctypes.byref, (sites, site_count, steps, step_count)))
    raw = sites[: site_count.value]
    calls = lines_of([[address for address in s.calls if address] for s in raw])
    found = [_site(s, kernels[s.launch], buffers[s.launch], at) for s, at in zip(raw, calls, strict=True)]
    order = [s.launch for s in raw]
    count = step_count.value
    numbers = np.ctypeslib.as_array(steps, (count,))["site"] if count else np.zeros(0, int)
    wanted = [n for n, site in enumerate(found) if not written or _writes(site, written)]
    kept = np.flatnonzero(np.isin(numbers, wanted)).tolist()
    launches = [order[steps[at].site] for at in kept]
    watched = [(n, _step(steps[at], found[steps[at].site], at, buffers[n])) for n, at in zip(launches, kept, strict=True)]
    watched.sort(key=lambda e: (e[0], e[1].phase, e[1].thread // LANES, e[1].epoch, e[1].order, e[1].thread))
    first_executed = sorted(zip(raw, found, strict=True), key=lambda pair: pair[0].statement)
    return Traced(_merged([s for _, s in first_executed if s.executions]), tuple(step for _, step in watched))


def _writes(site: AccessSite, buffer: str) -> bool:
    return site.writes and site.buffer is not None and site.buffer.name == buffer


def _site(s: _Site, kernel: str, buffers: Sequence[NamedBuffer], calls: tuple[Call, ...]) -> AccessSite:
    buffer = buffers[s.buffer] if s.buffer >= 0 else None
    what = s.what.decode().removeprefix("the ")
    numbers = (s.executions, s.lanes, s.bytes, s.phases, s.wavefronts, s.sectors, s.degree, s.width)
    return AccessSite(kernel, what, bool(s.write), buffer, calls, *numbers)


def _step(s: _Step, site: AccessSite, at: int, buffers: Sequence[NamedBuffer]) -> Step:
    value = bytes(s.value[: s.bytes]) if s.has_value else None
    if value is None or site.buffer is not None:
        return Step(site, s.block, s.thread, s.phase, s.epoch, s.order, s.offset, s.bytes, value, at)
    buffer, offset, phase, number = struct.unpack("<iIII", value)
    use = MbarrierUse(buffers[buffer], offset, phase, number)
    return Step(site, s.block, s.thread, s.phase, s.epoch, s.order, 0, 0, None, at, use)


def _merged(sites: Sequence[AccessSite]) -> tuple[AccessSite, ...]:
    """Sites with those merged that the host compiler duplicated."""
    whole: dict[tuple[object, ...], AccessSite] = {}
    for s in sites:
        key = (s.kernel, s.what, s.writes, s.buffer, s.calls, s.width)
        have = whole.get(key)
        whole[key] = s if have is None else _sum(have, s)
    return tuple(whole.values())


def _sum(a: AccessSite, b: AccessSite) -> AccessSite:
    added = ("executions", "lanes", "bytes", "phases", "wavefronts", "sectors")
    sums: dict[str, int] = {name: getattr(a, name) + getattr(b, name) for name in added}
    return replace(a, degree=max(a.degree, b.degree), **sums)  # type: ignore[arg-type]
