"""Findings of the emulated device's checked mode."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.device.protocol import DeviceError

INTERRUPTED = "interrupted"  # by Ctrl-C: not a mistake of the kernel

# In the order of `Kind` in runtime/state.hpp; the last one is found after the launches, by device.py.
KINDS = (
    "", "out of bounds", "write to a read-only tensor", "uninitialized shared read", "uninitialized global read", "race",
    "copy in flight", "misaligned access", "divergent barrier", "deadlock", "runaway loop",
    "missing proxy fence", "missing wgmma fence", "barrier misuse", "accumulator in use", "divergent warpgroup",
    "too many registers", "invalid operand",
    "division by zero", "trap", "stack overflow", "early access", INTERRUPTED, "counter not reset",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A statement of the generated file, and the thread that ran it (its linear index in the block)."""

    line: int
    text: str
    thread: int
    callers: tuple[tuple[int, str], ...] = ()  # the enclosing calls, innermost first: line and text


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A byte of a tensor, or of a part of shared memory. `element` says which element of the tensor has it, or is before it."""

    buffer: str
    offset: int
    element: str = ""

    def __str__(self) -> str:
        return f"byte {self.offset} of {self.buffer}{', ' if self.element else ''}{self.element}"


class EmulationError(DeviceError):
    """A mistake of a kernel. `kind` is one of KINDS, `what` says more in words; `at` is its place, and `other` that of a second
    thread if there is one; `where` is the memory that is involved, if it has a name."""

    def __init__(
        self,
        kind: str,
        what: str,
        kernel: str,
        block: tuple[int, int, int],
        at: Place,
        other: Place | None,
        where: BufferPlace | None = None,
    ) -> None:
        said = f": {what}" if what else ""
        lines = [f"{kind} in {kernel}, block {block}, thread {at.thread}{said}", *_show(at)]
        if other is not None:
            lines += [f"the other is thread {other.thread}", *_show(other)]
        super().__init__("\n".join(lines))
        self.kind, self.what, self.kernel, self.block = kind, what, kernel, block
        self.at, self.other, self.where = at, other, where


def _show(place: Place) -> list[str]:
    lines = [f"  line {place.line}: {place.text.strip()}"] if place.line else []
    return [*lines, *(f"    called from line {line}: {text.strip()}" for line, text in place.callers)]
