"""Overlap of strided arrays: an exact test, which reads no memory, and the check of a call's outputs by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from attngen.device.arrays import ArgumentError, ArrayView

MAX_WORK = 10**6  # candidate solutions that numpy's solver may try: at most some 40 ms, and microseconds for usual strides


def byte_range(array: ArrayView) -> tuple[int, int]:
    """The smallest range of bytes, from the array's address, that holds every element; empty for an empty array."""
    if 0 in array.shape:
        return 0, 0
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
    return low * array.dtype.bytes, (high + 1) * array.dtype.bytes


def share_memory(one: ArrayView, other: ArrayView, distance: int) -> bool:
    """Whether some byte belongs to both, if `other` begins `distance` bytes after `one`. True if the solver gives up."""
    return _share(
        _stand_in(one.shape, one.strides, one.dtype.bytes), _stand_in(other.shape, other.strides, other.dtype.bytes, distance)
    )


def overlaps_itself(array: ArrayView) -> bool:
    """Whether two elements of `array` share an address. True if the solver gives up."""
    if 0 in array.shape:
        return False
    axes = sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1)
    span = 0  # from the first to the last element along the axes so far
    for stride, size in axes:
        if stride <= span:
            return _some_difference_is_zero(axes)
        span += (size - 1) * stride
    return False


def _some_difference_is_zero(axes: Sequence[tuple[int, int]]) -> bool:
    """Two different elements share an address if, for the first axis along which their indices differ, element 0 and a later
    one do, with any indices along the axes that follow."""
    for position, (stride, size) in enumerate(axes):
        strides, sizes = zip(*axes[position + 1 :], strict=True) if axes[position + 1 :] else ((), ())
        later = _stand_in((size - 1, *sizes), (stride, *strides), 1, stride)
        if _share(_stand_in(sizes, strides, 1), later):
            return True
    return False


def _share(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


BASE = 1 << 60  # an address that is never read, far from both ends of the address space


def _stand_in(shape: Sequence[int], strides: Sequence[int], size: int, offset: int = 0) -> np.ndarray:
    """A numpy array of this layout at `BASE + offset`, whose elements are never read."""
    steps = tuple(s * size for s in strides)
    interface = {"version": 3, "typestr": f"|V{size}", "data": (BASE + offset, False), "shape": tuple(shape), "strides": steps}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


MAX_DISTANCES = 256  # remembered per call signature


class OverlapCheck:
    """Checks that outputs share no element with another array of the call: a block would read what others have written.

    Views that interleave without sharing an element, as the parts of a packed projection do, pass.
    """

    def __init__(self, arrays: Sequence[ArrayView], outputs: Sequence[int]) -> None:
        """`outputs` are the positions of outputs among `arrays`, the caller's."""
        # remembered calls must not keep arrays alive
        self._arrays = [replace(array, owner=None, keep=None) for array in arrays]
        self._pairs = [(i, j) for i in outputs for j in range(len(arrays)) if j != i]
        self._ranges = [byte_range(array) for array in arrays]
        self._disjoint: set[tuple[int, int, int]] = set()  # (i, j, distance in bytes) of ranges that overlap, elements not

    def check(self, addresses: Sequence[int]) -> None:
        """Raises ArgumentError if an output shares memory with another array. `addresses` begin with those of the arrays."""
        for i, j in self._pairs:
            (low, high), (other_low, other_high) = self._ranges[i], self._ranges[j]
            distance = addresses[j] - addresses[i]
            if low < distance + other_high and distance + other_low < high and (i, j, distance) not in self._disjoint:
                if share_memory(self._arrays[i], self._arrays[j], distance):
                    raise ArgumentError(
                        f"`{self._arrays[i].name}` and `{self._arrays[j].name}` share memory; pass an output that "
                        "overlaps no other argument"
                    )
                if len(self._disjoint) >= MAX_DISTANCES:
                    self._disjoint.clear()
                self._disjoint.add((i, j, distance))
