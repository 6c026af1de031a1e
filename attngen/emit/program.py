"""`Program`: the CUDA text emitted for a spec, its kernels in launch order, and its tensors.

Pure data, which the JSON manifest holds too. It is all that a launch needs: allocate the tensors whose role is not "input",
compute each kernel's grid and parameters from the sizes of the call, and launch the kernels in order on one stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from attngen.plan.formulas import SYMBOLS, ceil_div, expression, select, smaller
from attngen.plan.group_parts import GroupParts as GroupParts  # formulas too
from attngen.plan.heads_in_l2 import HeadsInL2 as HeadsInL2
from attngen.plan.split_keys import PackedTiles as PackedTiles
from attngen.plan.split_keys import Splits as Splits
from attngen.spec.expr import Expr

# --- formulas: numbers that the host computes from the sizes of a call ---------------------------------------------------

MULTIPROCESSORS = "multiprocessors"  # the size that is the number of SMs of the device
Sizes: TypeAlias = Mapping[str, int]  # sizes of a call, by the names of dimensions; with MULTIPROCESSORS


@dataclass(frozen=True, slots=True)
class CeilDiv:
    """`ceil(size / by)`: the number of blocks of `by` that cover the dimension named `size`."""

    size: str
    by: int

    def __call__(self, sizes: Sizes) -> int:
        return ceil_div(sizes[self.size], self.by)

    def __str__(self) -> str:
        return f"ceil({self.size} / {self.by})"


@dataclass(frozen=True, slots=True)
class OneMore:
    """`size + 1`: where each of so many sequences begins, and where the last one ends."""

    size: str

    def __call__(self, sizes: Sizes) -> int:
        return sizes[self.size] + 1

    def __str__(self) -> str:
        return f"{self.size} + 1"


@dataclass(frozen=True, slots=True)
class Sum:
    """`first + second`, of two sizes."""

    first: str
    second: str

    def __call__(self, sizes: Sizes) -> int:
        return sizes[self.first] + sizes[self.second]

    def __str__(self) -> str:
        return f"({self.first} + {self.second})"


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """`total // by + batch`: the blocks of `by` rows that packed sequences fill, if each begins with a block of its own."""

    total: str
    by: int
    batch: str

    def __call__(self, sizes: Sizes) -> int:
        return sizes[self.total] // self.by + sizes[self.batch]

    def __str__(self) -> str:
        return f"{self.total} / {self.by} + {self.batch}"


@dataclass(frozen=True, slots=True)
class Several:
    """1 if there is more than one of what `of` counts, else 0: then nothing is to be joined."""

    of: Splits | GroupParts

    def __call__(self, sizes: Sizes) -> int:
        return select(self.of(sizes) > 1, 1, 0)

    def __str__(self) -> str:
        return f"({self.of} > 1)"


# a number, the name of a dimension, or what follows from sizes
Extent = int | str | CeilDiv | OneMore | Sum | PackedBlocks | PackedTiles | Splits | GroupParts | Several


def grid_of_elements(sizes: tuple[Extent, ...], threads: int) -> tuple[Extent, ...]:
    """A grid with a thread for each element of an array, whose last dimension blocks of `threads` divide."""
    *others, last = sizes or (1,)
    blocks = -(-last // threads) if isinstance(last, int) else CeilDiv(str(last), threads)
    return (blocks, *reversed(others))


def evaluate(extent: Extent, sizes: Sizes) -> int:
    """The value of an extent."""
    if isinstance(extent, int):
        return extent
    return sizes[extent] if isinstance(extent, str) else extent(sizes)


def expression_of(extent: Extent) -> Expr:
    """An extent as an expression over the names of sizes."""
    return expression(evaluate(extent, SYMBOLS))


@dataclass(frozen=True, slots=True)
class Product:
    """A product of extents, or the size named `at_most` if that is less: one component of a grid.

    The factors are the dimensions of a work tile: its block of rows, head and batch.
    """

    factors: tuple[Extent, ...]
    at_most: str = ""

    def whole(self, sizes: Sizes) -> int:
        """The product alone: the number of work tiles."""
        return prod([evaluate(f, sizes) for f in self.factors])

    def __call__(self, sizes: Sizes) -> int:
        product = self.whole(sizes)
        return smaller(product, sizes[self.at_most]) if self.at_most else product

    def __str__(self) -> str:
        product = " * ".join(map(str, self.factors)) or "1"
        return f"min({product}, {self.at_most})" if self.at_most else product


# --- tensors -------------------------------------------------------------------------------------------------------------

Role = Literal["input", "output", "workspace", "counter"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: its name, "" if it has none, and its size, which each call states if it is the name itself."""

    name: str
    size: Extent

    @property
    def is_free(self) -> bool:
        """Whether the size is that of the caller's array."""
        return self.size == self.name


def free(name: str) -> Axis:
    """The axis whose size each call states."""
    return Axis(name, name)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that the kernels read or write. The role says who allocates it:

    "input":     the caller, who names it `argument`;
    "output":    the caller, or the call, which returns it. It must not share memory with another array;
    "workspace": the call. Contiguous, not initialized, unseen by the caller;
    "counter":   one number that must be 0 before a launch, and is 0 again after it. Launches that may run at the same time
                 need one each.
    """

    name: str  # in the CUDA text
    role: Role
    dtype: str  # a name of `attngen.spec.dtypes.DTYPES`
    axes: tuple[Axis, ...]
    argument: str = ""  # "": callers do not see it
    alignment: int = 0  # bytes that the address and every stride but the last must be a multiple of; 0: the element's size
    unit_stride: bool = False  # the last dimension must have stride 1
    broadcasts: bool = False  # an array of size 1 along a free axis stands for any size
    like: str = ""  # the argument whose array's shape its first dimensions have, broadcast or not, as that of a gradient
    unless: tuple[str, ...] = ()  # workspace only: not needed if the array `unless_of` has these sizes, all others being 1
    unless_of: str = ""

    @property
    def shape(self) -> tuple[Extent, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def key(self) -> str:
        """The name under which a call holds the array."""
        return self.argument or self.name

    @property
    def is_written(self) -> bool:
        return self.role != "input"


PACKED_ROWS = 2**30  # see the binding "packed_map" of a Parameter

# --- kernels -------------------------------------------------------------------------------------------------------------

Binding = Literal[
    "data", "map", "packed_map", "paged_map", "stride", "step", "extent", "size", "param", "section", "splits", "parts"
]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel, in the order of its signature.

    binding "data":   the address of tensor `of`;
    binding "map":    a tensor map of `of` for TMA: [batch, head, row, element], the innermost first, in boxes of 128 bytes by
                      `dim` rows with the 128-byte swizzle, zeros outside;
    binding "packed_map": a tensor map of packed rows `of`, [total, head, element], by five dimensions: element; row, of which
                      there are PACKED_ROWS; head; row once more; and one with a stride of 2^34 elements less that of a row.
                      The last two have no end. Coordinates (c, PACKED_ROWS - n + i, h, begin + n, PACKED_ROWS) are row i of a
                      sequence of n rows from `begin` on, which is outside if i >= n. Boxes as for "map";
    binding "paged_map": the same of a pool of pages or padded keys `of`, [page or batch, head, row, element]: page p begins at
                      row p * n, where n is the stride of a page divided by that of a row;
    binding "stride": the stride, in elements, of dimension `dim` of tensor `of` (0 where it is broadcast);
    binding "step":   the same in bytes;
    binding "extent": the size of dimension `dim` of the array of tensor `of`: 1 where it is broadcast;
    binding "size":   the size of the dimension named `of`;
    binding "param":  the value of the spec's `param of`;
    binding "section", "splits", "parts": the value of `formula`.
    """

    name: str
    ctype: str  # "const fp16*", "long long", "int", "float", "bool"
    binding: Binding
    of: str
    dim: int = 0
    formula: HeadsInL2 | Splits | GroupParts | None = None

    @property
    def is_captured(self) -> bool:
        """Whether it belongs to the captured values that the variant's functions read."""
        return self.name.startswith("captured_")


@dataclass(frozen=True, slots=True)
class SharedRange:
    """A named range of a block's dynamic shared memory, in bytes, and what it holds."""

    name: str
    offset: int
    bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One `__global__` function and how to launch it. A grid with a zero in it means: do not launch."""

    name: str
    parameters: tuple[Parameter, ...]
    grid: tuple[Product, Product, Product]
    block: tuple[int, int, int]
    shared_bytes: int = 0  # dynamic
    shared_buffers: tuple[SharedRange, ...] = ()
    early: bool = (
        False  # may start while the kernel before it runs, which it waits for itself: see primitives/griddepcontrol.cuh
    )


@dataclass(frozen=True, slots=True)
class Program:
    """One emitted file: `text` compiles for `arch` with NVRTC or nvcc, with no header of any toolkit."""

    name: str
    text: str
    arch: str  # "sm_80", "sm_90a", ...
    kernels: tuple[KernelEntry, ...]
    tensors: tuple[Tensor, ...]

    def __repr__(self) -> str:
        kernels = ", ".join(e.name for e in self.kernels)
        return f"<Program {self.name}.cu for {self.arch}: {len(self.text.splitlines())} lines, kernels {kernels}>"

    def of_role(self, *roles: Role) -> tuple[Tensor, ...]:
        """The tensors of these roles, in the table's order."""
        return tuple(t for t in self.tensors if t.role in roles)
