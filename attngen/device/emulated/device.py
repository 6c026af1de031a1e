"""`EmulatedDevice`: runs generated CUDA on the CPU, thread by thread; its checked mode checks every memory access.

`docs/trace.md` describes how to trace a kernel, and how to step through it with gdb.
"""

from __future__ import annotations

import _ctypes
import ctypes
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np

from attngen.device.emulated import tracing
from attngen.device.emulated.buffers import buffers_of, find
from attngen.device.emulated.build import build_library, calls_of
from attngen.device.emulated.copies import copies_of, element_at
from attngen.device.emulated.findings import INTERRUPTED, KINDS, BufferPlace, EmulationError, Place
from attngen.device.emulated.tensor_map import encode
from attngen.device.emulated.tracing import Call, Traced, Watch, ints, words
from attngen.device.emulated.translate import Translated, primitive_lines, translate
from attngen.device.protocol import DeviceError, Launch, Memory
from attngen.device.tensor_map import MappedTensor
from attngen.emit.program import Program

MULTIPROCESSORS = 2  # few, so that the blocks of a persistent kernel get several work tiles
ACCESS_BUDGET = 2**32  # accesses of one thread, and its waits by their costs; more count as an endless loop
NEAR = 2**20  # bytes from a tensor, to which an address outside is compared
SMALL_BUDGET = 2**24  # accesses of one thread, for a small problem
_lock = threading.Lock()  # a library has the state of one launch, and a process the stacks and signal handlers of one


if sys.platform == "win32":
    _close = _ctypes.FreeLibrary
else:
    _close = _ctypes.dlclose


TRACE, WAITERS = 16, 8  # as in runtime/state.hpp
TRACED = 2  # mode of emulator_launch; 0 is fast, 1 checked


class _Stacks(ctypes.Structure):
    """`Stacks` of runtime/state.hpp."""

    _fields_ = words("memory count")


_stacks = _Stacks()  # for the launch that holds the lock


def _load(library: Path) -> ctypes.CDLL:
    """A library of a kernel. Raises DeviceError for one that this machine does not load."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise DeviceError(
            f"the compiled kernel cannot be loaded ({error}): its directory must allow programs to be executed, which "
            "ATTNGEN_CACHE_DIR changes, and CXX must compile for this machine"
        ) from None
    loaded.emulator_library.restype = ctypes.c_uint64
    return loaded


class _Waiter(ctypes.Structure):
    """`Waiter` of runtime/state.hpp."""

    _fields_ = (*ints("thread line"), ("trace", ctypes.c_uint64 * TRACE), *words("address"), ("text", ctypes.c_char * 192))


class _Finding(ctypes.Structure):
    """`Finding` of runtime/state.hpp."""

    _fields_ = (
        *ints("kind line other_line"), *words("code other_code"), *ints("thread other_thread"), ("block", ctypes.c_uint * 3),
        *words("address"), *ints("bytes waiter_count"), ("trace", ctypes.c_uint64 * TRACE), ("waiters", _Waiter * WAITERS),
        ("text", ctypes.c_char * 256),
    )  # fmt: skip


class _Range(ctypes.Structure):
    """`Range` of runtime/state.hpp."""

    _fields_ = (*words("pointer bytes"), *ints("writable element_bytes"), *words("elements read written"))


def _range(one: Memory, elements: np.ndarray | None) -> _Range:
    """A tensor as the runtime sees it; `elements` as of `Copies`."""
    if elements is None or one.array is None:
        return _Range(one.pointer, one.bytes, int(one.writable))
    return _Range(one.pointer, one.bytes, int(one.writable), one.array.dtype.bytes, elements.ctypes.data)


@dataclass(slots=True)
class Counters:
    """Exact counts of one call, summed over its launches; bytes are counted only in checked mode."""

    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    shared_bytes_read: int = 0
    shared_bytes_written: int = 0
    barriers: int = 0
    instructions: dict[str, int] = field(default_factory=dict)  # PTX instructions of each thread; FMA only in checked mode


@dataclass(frozen=True)
class EmulatedDevice:
    """The CPU as a CUDA device."""

    checked: bool = True  # check every access (see EmulationError) and count bytes; else kernels run several times faster
    seed: int = 0  # others than 0 permute the order of a block's threads after every barrier
    arch: str = "sm_80"  # the architecture of plans
    watch: Watch | None = None  # a checked device also traces every access, and the steps of the threads that it names
    debug: bool = False  # compile for a debugger
    garbage: bool = False  # local variables without a value hold garbage, not what is left in memory, which often is 0
    multiprocessors: int = MULTIPROCESSORS  # persistent kernels have a block for each; keys are split over as many

    def __post_init__(self) -> None:
        assert self.checked or self.watch is None

    @property
    def name(self) -> str:
        return "emulated" if self.checked else "emulated:fast"

    def compile(self, source: Program) -> EmulatedKernel:
        """The kernel of `source`, from the cache or the host compiler. Raises CompilationError, DeviceError."""
        translated = translate(source)
        library = build_library(translated.text, source.name, self.checked, self.debug, self.garbage)
        return EmulatedKernel(source, library, translated, self)


@dataclass(slots=True, weakref_slot=True)
class EmulatedKernel:
    """A library loaded into this process. `counters`, and `traced` if the device traces, are those of the latest call."""

    source: Program
    library: Path
    translated: Translated = field(repr=False)
    device: EmulatedDevice
    traced: Traced | None = None
    counters: Counters = field(default_factory=Counters)
    _loaded: ctypes.CDLL | None = None

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        """Runs `launches` to their end. Raises EmulationError for the first finding of the checked mode; what the launches have
        written is then lost."""
        with _lock:
            if not self.device.checked:
                return self._launch(launches, memory, [None] * len(memory))
            copies = copies_of(memory)
            self._launch(tuple(map(copies.moved, launches)), copies.memory, copies.elements)
            copies.write_back()

    def _launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], elements: Sequence[np.ndarray | None]) -> None:
        if self._loaded is None:
            self._loaded = _load(self.library)
            # frees some megabytes of tables with the last kernel that uses the library
            weakref.finalize(self, _close, self._loaded._handle).atexit = False
        for counter in (m for m in memory if m.counter):
            ctypes.memset(counter.pointer, 0, counter.bytes)
        ranges = (_Range * len(memory))(*map(_range, memory, elements))
        counts = (ctypes.c_uint64 * max(1, len(self.translated.instructions)))()
        totals = (ctypes.c_uint64 * 3)()
        buffers = [buffers_of(one.entry, memory, self.library) for one in launches] if self.device.watch is not None else []
        for position, one in enumerate(launches):
            if self.device.watch is not None:
                tracing.begin(self._loaded, position == 0, buffers[position], self.device.watch)
            self._one(one, position == 0, memory, ranges, counts, totals)
        if self.device.watch is not None:
            kernels = [one.entry.name for one in launches]
            self.traced = tracing.collect(self._loaded, kernels, buffers, self._calls, self.device.watch.written)
        self._check_counters(launches[-1], memory)
        self.counters = Counters(
            {m.name: r.read for m, r in zip(memory, ranges, strict=True)},
            {m.name: r.written for m, r in zip(memory, ranges, strict=True) if m.writable},
            totals[0],
            totals[1],
            totals[2],
            dict(zip(self.translated.instructions, counts, strict=False)),
        )

    def _check_counters(self, last: Launch, memory: tuple[Memory, ...]) -> None:
        """Raises EmulationError if a counter of work is not 0 again: launches that are repeated do not set it."""
        for counter in (m for m in memory if m.counter):
            if any(ctypes.string_at(counter.pointer, counter.bytes)):
                what = f"{counter.name} is not 0 when the kernels end: the next launch would begin with what is left"
                raise EmulationError("counter not reset", what, last.entry.name, (0, 0, 0), Place(0, "", 0), None)

    def _one(
        self,
        one: Launch,
        first: bool,
        memory: tuple[Memory, ...],
        ranges: ctypes.Array[_Range],
        counts: ctypes.Array[ctypes.c_uint64],
        totals: ctypes.Array[ctypes.c_uint64],
    ) -> None:
        assert self._loaded is not None
        finding = _Finding()
        values = [encode(a.map, a.pointer) if isinstance(a, MappedTensor) else a for a in one.arguments]
        addresses = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        arguments = (
            ctypes.cast(getattr(self._loaded, f"attngen_call_{one.entry.name}"), ctypes.c_void_p),
            addresses,
            (ctypes.c_uint * 3)(*one.grid),
            (ctypes.c_uint * 3)(*one.entry.block),
            ctypes.c_size_t(one.entry.shared_bytes),
            ranges,
            len(ranges),
            ctypes.c_uint64(self.device.seed),
            TRACED if self.device.watch is not None else int(self.device.checked),
            ctypes.c_uint64(_budget(one, memory)),
            int(first),
            int(one.entry.early),
            counts,
            totals,
            ctypes.byref(_stacks),
            ctypes.byref(finding),
        )
        try:
            status = self._loaded.emulator_launch(*arguments)
        except KeyboardInterrupt:  # raised by Python's own handler, after the launch has stopped
            raise KeyboardInterrupt(*self._interrupted(one, memory, finding)) from None
        if status == 2:
            raise DeviceError("there is not enough memory for the stacks of the emulated threads")
        if status and KINDS[finding.kind] == INTERRUPTED:  # a handler of SIGINT that raises nothing
            raise KeyboardInterrupt(*self._interrupted(one, memory, finding))
        if status:
            raise self._error(one, memory, finding)

    def _interrupted(self, one: Launch, memory: tuple[Memory, ...], finding: _Finding) -> tuple[str, ...]:
        """The place at which an interrupted launch was, if it has not ended before."""
        return (str(self._error(one, memory, finding)),) if KINDS[finding.kind] == INTERRUPTED else ()

    def _error(self, one: Launch, memory: tuple[Memory, ...], finding: _Finding) -> EmulationError:
        at = self._place(finding.line, finding.code, finding.thread, finding.trace)
        other = None
        if finding.other_thread >= 0:
            other = self._place(finding.other_line, finding.other_code, finding.other_thread)
        waiters = [self._waiter(w, self._where(one, memory, w.address)) for w in finding.waiters[: finding.waiter_count]]
        text = "; ".join(filter(None, [*waiters, finding.text.decode(errors="replace")]))
        where = self._where(one, memory, finding.address) if finding.bytes else None
        if finding.bytes:
            text += f" ({finding.bytes} bytes at {where or _beside(memory, finding.address)})"
        x, y, z = finding.block
        return EmulationError(KINDS[finding.kind], text, one.entry.name, (x, y, z), at, other, where)

    def _where(self, one: Launch, memory: tuple[Memory, ...], address: int) -> BufferPlace | None:
        """The buffer that contains an address, and the offset in it."""
        for tensor in memory:
            if tensor.pointer <= address < tensor.pointer + tensor.bytes:
                return BufferPlace(tensor.name, address - tensor.pointer, element_at(tensor, address - tensor.pointer))
        assert self._loaded is not None
        offset = ctypes.c_uint64()
        kind = self._loaded.emulator_shared_offset(ctypes.c_uint64(address), ctypes.byref(offset))
        if not kind:
            return None
        buffer = find(buffers_of(one.entry, memory, self.library), kind == 2, offset.value)
        return BufferPlace(buffer.label, offset.value - buffer.offset)

    def _calls(self, stacks: Sequence[Sequence[int]]) -> list[tuple[Call, ...]]:
        """The calls in the generated file of each stack of addresses in the library, innermost first."""
        lines, in_ptx = self.source.text.splitlines(), primitive_lines(self.source.text)
        each = ([number for number, _ in groupby(numbers)] for numbers in self._lines(stacks))
        return [tuple(Call(n, lines[n - 1].strip(), n in in_ptx) for n in numbers) for numbers in each]

    def _lines(self, stacks: Sequence[Sequence[int]]) -> list[list[int]]:
        """The lines of the generated file behind each stack of addresses in the library, innermost first."""
        assert self._loaded is not None
        base, count = self._loaded.emulator_library(), len(self.source.text.splitlines())
        offsets = [address - base for stack in stacks for address in stack if address > base]
        known = calls_of(self.library, offsets, f"{self.source.name}.cu")
        return [[n for address in stack for n in known.get(address - base, []) if 0 < n <= count] for stack in stacks]

    def _waiter(self, waiter: _Waiter, where: BufferPlace | None) -> str:
        """The thread, and what it waits for, `where` for an mbarrier; for a primitive, the line of its call."""
        place = self._place(waiter.line, 0, waiter.thread, waiter.trace)
        line, text = place.callers[0] if place.callers else (place.line, "")
        quoted = f" ({text.strip()})" if text else ""
        what = waiter.text.decode().replace("{}", str(where))
        return f"thread {waiter.thread} waits for {what} at line {line}{quoted}"

    def _place(self, line: int, code: int, thread: int, trace: Sequence[int] = ()) -> Place:
        texts = ("", *self.source.text.splitlines())
        own, calls = self._lines(((code,), trace or (code,)))
        if not line and code:
            line = next(iter(own), 0)
        if line in calls:
            calls = calls[calls.index(line) + 1 :]
        callers = tuple((number, texts[number]) for number in dict.fromkeys(calls) if number != line and texts[number])
        return Place(line, texts[line] if line < len(texts) else "", thread, callers)


def _beside(memory: tuple[Memory, ...], address: int) -> str:
    """An address outside every tensor, by its distance from the end or the begin of the nearest one, if one is near."""
    past = [(address - m.pointer - m.bytes, f"{{}} past the end of {m.name}") for m in memory]
    ahead = [(m.pointer - address, f"{{}} before {m.name}") for m in memory]
    distance, text = min((one for one in (*past, *ahead) if one[0] >= 0), default=(NEAR, ""))
    return text.format(f"byte {distance}") if distance < NEAR else hex(address)


def _budget(one: Launch, memory: tuple[Memory, ...]) -> int:
    """The most accesses that a thread of a launch may make.

    The work of an attention is at most rows times keys times head size, divided among the blocks and their threads. The square
    of the bytes of its tensors is larger by far.
    """
    work = sum(m.bytes for m in memory) ** 2 // (1024 * max(1, prod(one.grid)))
    return min(ACCESS_BUDGET, SMALL_BUDGET + work)
