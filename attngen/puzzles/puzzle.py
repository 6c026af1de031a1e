"""`Puzzle` and `Case`: what `puzzle.py` of a puzzle's folder defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from attngen.device.tensor_map import TensorMap
from attngen.emit.wgmma import Wgmma
from attngen.puzzles.counts import Target

Array: TypeAlias = np.ndarray
Random: TypeAlias = np.random.Generator


@dataclass(frozen=True, slots=True)
class Case:
    """One launch of the kernel: its arguments, and what it must write.

    `given` has inputs and numbers by the names of the kernel's parameters, and tensor maps with the arrays that they name.
    Element types are those of numpy: float16 is `fp16` in CUDA. An array in `expected` is written. It has the type of the
    kernel's parameter, and holds garbage before, unless it is in `given` too. An element is right if it differs from the
    expected one by at most `tolerance * (1 + |expected|)`.
    """

    what: str  # its sizes, in words
    given: Mapping[str, Any]
    expected: Mapping[str, Array]
    blocks: tuple[int, ...]  # the grid: x, y, z
    threads: tuple[int, ...]  # threads of a block: x, y, z
    tolerance: float = 0.0
    operations: int = 0  # additions and products of the matrices, for the rate on a GPU; 0 if memory alone matters


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One puzzle. `cases` makes the launches from a generator of random numbers; counts are those of the first. `large` makes
    the launch that a GPU is timed with."""

    title: str
    teaches: str
    cases: Callable[[Random], Sequence[Case]]
    large: Callable[[Random], Case]
    targets: tuple[Target, ...]
    arch: str = "sm_80"
    products: tuple[Wgmma, ...] = field(default=())  # the wrappers that `#include "products.cuh"` stands for


def whole_numbers(rng: Random, *shape: int, dtype: type[np.floating] = np.float32) -> Array:
    """Random whole numbers from -4 to 4: sums of their products are exact in any order, and easy to follow by hand."""
    return rng.integers(-4, 5, shape).astype(dtype)


def normal_numbers(rng: Random, *shape: int, dtype: type[np.floating] = np.float32) -> Array:
    """Random numbers around 0, as activations are."""
    return rng.normal(size=shape).astype(dtype)


def rows_map(tensor: str, array: Array, rows: int) -> TensorMap:
    """A tensor map of the fp16 matrix `array`, the argument called `tensor`, in boxes of `rows` rows by 64 columns, swizzled.
    tma_load takes coordinates (column, row, 0, 0)."""
    count, columns = array.shape
    stride = columns * array.itemsize
    return TensorMap(tensor, "fp16", (columns, count, 1, 1), (stride, count * stride, count * stride), (64, rows, 1, 1))
