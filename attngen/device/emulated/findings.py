"""What the checked mode of the emulated device finds."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.device.protocol import DeviceError

# In the order of `Kind` in runtime/state.hpp.
KINDS = (
    "",
    "out of bounds",
    "write to a read-only tensor",
    "uninitialized shared read",
    "uninitialized global read",
    "race",
    "copy in flight",
    "misaligned access",
    "divergent barrier",
    "deadlock",
    "runaway loop",
    "missing proxy fence",
    "missing wgmma fence",
    "barrier misuse",
    "accumulator in use",
    "divergent warpgroup",
    "too many registers",
    "invalid operand",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A statement of the generated file, and the thread that ran it (its linear index in the block)."""

    line: int
    text: str
    thread: int
    callers: tuple[tuple[int, str], ...] = ()  # the calls that it is in, innermost first: line and text


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A byte of a tensor, or of a part of shared memory."""

    buffer: str
    offset: int

    def __str__(self) -> str:
        return f"byte {self.offset} of {self.buffer}"


class EmulationError(DeviceError):
    """A kernel did what it must not. `kind` is one of KINDS; `at` and, where two threads are involved, `other` are places;
    `where` is the memory that it is about, where there is some that has a name."""

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
        lines = [f"{kind} in {kernel}, block {block}, thread {at.thread}: {what}", *_show(at)]
        if other is not None:
            lines += [f"the other is thread {other.thread}", *_show(other)]
        super().__init__("\n".join(lines))
        self.kind, self.kernel, self.block, self.at, self.other, self.where = kind, kernel, block, at, other, where


def _show(place: Place) -> list[str]:
    lines = [f"  line {place.line}: {place.text.strip()}"] if place.line else []
    return [*lines, *(f"    called from line {line}: {text.strip()}" for line, text in place.callers)]
