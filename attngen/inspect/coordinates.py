"""Bytes of a buffer as elements: `K[0, 0, 3, 16:24]` of a tensor, `K_smem[1, 3, 16:24]` of a tile in shared memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from attngen.device.emulated.buffers import NamedBuffer
from attngen.emit.kernel_source import KernelSource, evaluate_extent
from attngen.plan import Plan
from attngen.spec.dtypes import DTYPES, from_storage

# What the planner says of a buffer begins with its element type and its dimensions; `+ n` is padding.
_LAYOUT = re.compile(r"(\w+) ((?:\[[\d +*]+\])+)")
_ARRAY = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s+)?(\w+) (\w+)\[")
_BYTES = {"int": 4, "float": 4, "unsigned": 4, "mbarrier": 8, "byte": 1}
_NUMPY = {"int": np.int32, "float": np.float32, "unsigned": np.uint32}
ROW_BYTES = 128  # of a swizzled slab


@dataclass(frozen=True, slots=True)
class Layout:
    """How elements lie in a buffer: `shape` with the padding of rows, its first number not used; `swizzled`: chunks of 16 bytes
    are permuted in rows of 128."""

    dtype: str
    shape: tuple[int, ...]
    swizzled: bool = False

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].bytes if self.dtype in DTYPES else _BYTES[self.dtype]

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

    def values(self, stored: bytes) -> list[Any]:
        """The numbers that `stored` holds."""
        if self.dtype in DTYPES:
            whole = np.frombuffer(stored, DTYPES[self.dtype].numpy)
            return [x.item() for x in from_storage(whole)]
        return [x.item() for x in np.frombuffer(stored, _NUMPY.get(self.dtype, np.uint8))]


def layouts(source: KernelSource, plan: Plan, sizes: Mapping[str, int]) -> dict[str, Layout]:
    """The layout of every tensor (taken to be contiguous), by its name, and of every shared buffer, by its label."""
    found = {t.name: Layout(t.dtype, tuple(evaluate_extent(e, dict(sizes)) for e in t.shape)) for t in source.tensors}
    for buffer in plan.buffers:
        layout = planned(buffer.what, plan.by_tma and buffer.name in "QKVO")
        if layout is not None:
            found[NamedBuffer(buffer.name, -1, False, 0, 0).label] = layout
    arrays = {name: element for element, name in _ARRAY.findall(source.text) if element in DTYPES or element in _BYTES}
    return found | {name: Layout(element, (1,)) for name, element in arrays.items()}


def planned(what: str, swizzled: bool = False) -> Layout | None:
    """The layout that the planner's words for a buffer begin with."""
    match = _LAYOUT.match(what)
    if match is None:
        return None
    dims = re.findall(r"\[([^\]]+)\]", match[2])
    return Layout(match[1], tuple(_extent(d) for d in dims), swizzled)


def _extent(text: str) -> int:
    """A sum of products of numbers."""
    return sum(prod(int(factor) for factor in term.split("*")) for term in text.split("+"))
