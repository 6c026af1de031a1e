"""Bytes of a buffer as elements: `K[0, 0, 3, 16:24]` of a tensor, `K_smem[1, 3, 16:24]` of a tile in shared memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attngen.device.emulated.buffers import NamedBuffer
from attngen.emit.program import Program, evaluate
from attngen.plan import Plan, SharedBuffer
from attngen.plan.shared_memory import ELEMENT_BYTES
from attngen.spec.dtypes import DTYPES, from_storage

_ARRAY = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s+)?(\w+) (\w+)\[")
_NUMPY = {"int": np.int32, "float": np.float32, "unsigned": np.uint32}
ROW_BYTES = 128  # per row of a swizzled slab


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrangement of elements in a buffer."""

    dtype: str
    shape: tuple[int, ...]  # with padding; the first number is not used
    swizzled: bool = False  # 16-byte chunks are permuted within rows of 128 bytes

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def at(self, offset: int, width: int) -> str:
        """The elements of `width` bytes from `offset` on, as an index."""
        if self.swizzled:
            offset ^= offset // ROW_BYTES % 8 * 16
        first, count = offset // self.element_bytes, max(1, width // self.element_bytes)
        indices: list[str] = []
        for size in reversed(self.shape):
            first, index = divmod(first, size) if len(indices) < len(self.shape) - 1 else (0, first)
            indices.append(str(index) if indices or count == 1 else f"{index}:{index + count}")
        return f"[{', '.join(reversed(indices))}]"

    def values(self, stored: bytes) -> list[int | float]:
        """The numbers in the bytes `stored`."""
        if self.dtype in DTYPES:
            whole = np.frombuffer(stored, DTYPES[self.dtype].numpy)
            return [x.item() for x in from_storage(whole)]
        return [x.item() for x in np.frombuffer(stored, _NUMPY.get(self.dtype, np.uint8))]


def layouts(source: Program, plan: Plan, sizes: Mapping[str, int]) -> dict[str, Layout]:
    """The layout of every tensor (assumed to be contiguous) by name, and of every shared buffer by label."""
    found = {t.name: Layout(t.dtype, tuple(evaluate(e, sizes) for e in t.shape)) for t in source.tensors}
    for buffer in plan.buffers:
        found[NamedBuffer(buffer.name, -1, False, 0, 0).label] = of_buffer(buffer)
    arrays = {name: element for element, name in _ARRAY.findall(source.text) if element in ELEMENT_BYTES}
    return found | {name: Layout(element, (1,)) for name, element in arrays.items()}


def of_buffer(buffer: SharedBuffer) -> Layout:
    return Layout(buffer.element, (*buffer.shape[:-1], buffer.shape[-1] + buffer.pad), buffer.swizzled)
