"""Launches of one custom call, prepared once for its shapes and repeated with the addresses of later calls.

Those cost the host no checks and no plan. XLA's arrays are contiguous, so the text of a call and the shapes of its arrays are
its signature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from attngen.device.arrays import ArrayView, Location
from attngen.device.binding import Bound, callers_tensors

ALIGNMENT = 256  # bytes, the alignment of workspaces; kernels need at most 128
MOST = 4096  # signatures that are kept; the oldest are dropped
Signature = tuple[object, ...]


class Scratch(Protocol):
    """The memory of a call, from which workspaces are taken."""

    def scratch(self, size: int) -> int:
        """The address of so many bytes, a multiple of ALIGNMENT, until the call's kernels end."""


class RepeatedCall:
    """The launches of `bound` by a kernel on a GPU. The caller's arrays have the names `arguments`, in the order of the custom
    call; `counter_of` is the address of a zero for launches on a stream, each of which leaves it zero."""

    def __init__(self, bound: Bound, arguments: Sequence[str], counter_of: Callable[[int], int]) -> None:
        program, self._kernel = bound.kernel.source, bound.kernel
        callers, workspaces = callers_tensors(program), program.of_role("workspace")
        counters = program.of_role("counter")
        self._places = tuple(arguments.index(bound.arrays[t.key].name) for t in callers)
        self._aligned = tuple((i, t.alignment - 1) for i, t in enumerate(callers) if t.alignment)
        sizes = [math.prod(bound.arrays[t.key].shape) * bound.arrays[t.key].dtype.bytes for t in workspaces]
        rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        self._starts, self._bytes = [0, *accumulate(rounded)][: len(rounded)], sum(rounded)
        self._counters, self._counter_of = len(counters), counter_of
        self._overlap = bound.overlap
        self._repeat = None
        if bound.launches:
            order = tuple(t.name for t in (*callers, *workspaces, *counters))
            self._repeat = self._kernel.repeat(bound.launches, order)  # type: ignore[attr-defined]

    def __call__(self, arrays: Sequence[ArrayView], memory: Scratch, stream: int) -> bool:
        """Launches, unless an address is not aligned as the kernel's copies require: the usual call says which. Raises
        ArgumentError if a result shares memory with another array, DeviceError."""
        addresses = [arrays[place].pointer for place in self._places]
        if any(addresses[i] & bits for i, bits in self._aligned):
            return False
        if self._overlap is not None:
            self._overlap.check(addresses)
        if self._repeat is not None:
            self._kernel.make_current()  # type: ignore[attr-defined]  # threads of XLA may have used another GPU before
            start = memory.scratch(self._bytes) if self._bytes else 0
            addresses += [start + offset for offset in self._starts]
            addresses += [self._counter_of(stream)] * self._counters
            self._repeat(addresses, stream)
        return True


def signature(text: str, location: Location, arrays: Sequence[ArrayView]) -> Signature:
    return (text, location, *(array.shape for array in arrays))


class RepeatedCalls(dict[Signature, tuple[RepeatedCall, ...]]):
    """What is prepared, by signature: a custom call is one program, or those of the parts of a backward."""

    def __setitem__(self, key: Signature, calls: tuple[RepeatedCall, ...]) -> None:
        while len(self) >= MOST:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, calls)
