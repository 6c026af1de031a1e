"""The tensors of a call as the checked mode gives them to a kernel: copies in memory of their own, far apart.

Where an access lies says which tensor it was meant for. In the caller's memory it does not: K may end where V begins, and a
stray access from one to the other would pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from attngen.device.arrays import ArrayView
from attngen.device.emulated.address_space import AddressSpace
from attngen.device.protocol import Argument, DeviceError, Launch, Memory
from attngen.device.tensor_map import MappedTensor

Array = np.ndarray
APART = 2**26  # bytes between tensors, beside several times the size of the largest: addresses are cheap, and nothing is there
TIMES_LARGEST, FARTHEST = 4, 2**32
PAGE = 4096  # copies lie in pages as the tensors do: at the same alignment, in the same sectors


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of tensors. `elements` has, for one with gaps between its elements, which places in its range are elements."""

    given: tuple[Memory, ...]
    memory: tuple[Memory, ...]
    elements: tuple[Array | None, ...]
    space: AddressSpace

    def moved(self, launch: Launch) -> Launch:
        """`launch` with the copies' addresses."""
        distances = {one.name: copy.pointer - one.pointer for one, copy in zip(self.given, self.memory, strict=True)}

        def with_copy(argument: Argument, distance: int) -> Argument:
            if isinstance(argument, MappedTensor):
                return replace(argument, pointer=argument.pointer + distance)
            return ctypes.c_void_p((argument.value or 0) + distance) if isinstance(argument, ctypes.c_void_p) else argument

        pairs = zip(launch.entry.parameters, launch.arguments, strict=True)
        return replace(launch, arguments=tuple(with_copy(a, distances.get(p.of, 0)) for p, a in pairs))

    def write_back(self) -> None:
        """Copies what was written to the tensors themselves."""
        for one, copy in zip(self.given, self.memory, strict=True):
            if one.writable:
                _copy(copy, one)


def copies_of(memory: Sequence[Memory]) -> Copies:
    """Copies of the tensors of a call. Raises DeviceError if there is not enough memory."""
    apart = APART + min(TIMES_LARGEST * max((m.bytes for m in memory), default=0), FARTHEST)
    apart += -apart % PAGE
    total = apart + sum(m.bytes + apart + 2 * PAGE for m in memory)
    copies = []
    try:
        space = AddressSpace(total)
        end = space.base
        for one in memory:
            start = end + apart + (one.pointer - end - apart) % PAGE
            space.use(start, one.bytes)
            copies.append(replace(one, pointer=start))
            end = start + one.bytes
    except OSError as error:
        raise DeviceError(f"there is not enough memory for copies of the call's tensors: {error}") from None
    for one, copy in zip(memory, copies, strict=True):
        _copy(one, copy)
    return Copies(tuple(memory), tuple(copies), tuple(map(_elements, memory)), space)


def _copy(source: Memory, target: Memory) -> None:
    """Copies the elements of a tensor, and nothing between them: there may be another tensor."""
    array = source.array
    if array is None or _is_gapless(array):
        ctypes.memmove(target.pointer, source.pointer, source.bytes)
    else:
        _strided(target)[...] = _strided(source)


def _strided(one: Memory) -> Array:
    """The elements of a tensor with gaps, as integers."""
    assert one.array is not None
    size, distinct = one.array.dtype.bytes, _distinct(one.array)
    shape, strides = ([n for n, _ in distinct], [s * size for _, s in distinct])
    interface = {
        "version": 3, "typestr": f"<u{size}", "data": (one.pointer, False), "shape": tuple(shape), "strides": tuple(strides),
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _distinct(array: ArrayView) -> list[tuple[int, int]]:
    """Sizes and distances in elements of the dimensions along which addresses differ, the largest distance first."""
    return sorted(((n, abs(s)) for n, s in zip(array.shape, array.strides, strict=True) if n > 1 and s), key=lambda d: -d[1])


def _is_gapless(array: ArrayView) -> bool:
    """Whether an array's elements fill the range of its addresses."""
    filled = 1  # elements, from the lowest address on
    for size, stride in reversed(_distinct(array)):
        if stride > filled and 0 not in array.shape:
            return False
        filled += (size - 1) * stride
    return True


def _elements(one: Memory) -> Array | None:
    """One byte for each place of an element in the range of a tensor, 1 for those that are elements; None for all."""
    if one.array is None or _is_gapless(one.array):
        return None
    size, distinct = one.array.dtype.bytes, _distinct(one.array)
    found = np.zeros(one.bytes // size, np.uint8)
    shape, strides = [n for n, _ in distinct], [s for _, s in distinct]
    np.lib.stride_tricks.as_strided(found, shape, strides)[...] = 1
    return found


def element_at(one: Memory, offset: int) -> str:
    """Which element of a tensor has the byte at `offset` of its range, or is the last one before; "" if there is none."""
    array = one.array
    if array is None or 0 in array.shape:
        return ""
    index, rest = [0] * len(array.shape), offset // array.dtype.bytes
    for d in sorted(range(len(index)), key=lambda d: -abs(array.strides[d])):
        if array.shape[d] > 1 and array.strides[d]:
            step = abs(array.strides[d])
            place = min(rest // step, array.shape[d] - 1)
            rest -= place * step
            index[d] = place if array.strides[d] > 0 else array.shape[d] - 1 - place
    return f"{'after' if rest else 'in'} element [{', '.join(map(str, index))}]"
