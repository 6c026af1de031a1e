"""`KernelSource`: one emitted CUDA file and its ABI. Pure data; it is also what the JSON manifest holds.

A kernel is launched from this alone: allocate the tensors whose role is not "input", fill every entry point's parameters
from their bindings, evaluate the launch rule, and launch the entry points in order on one stream.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from attngen.plan.plan import SharedBuffer

__all__ = [
    "Binding",
    "CeilDiv",
    "EntryPoint",
    "Extent",
    "KernelSource",
    "Parameter",
    "Product",
    "Sections",
    "SharedBuffer",
    "TensorSpec",
    "evaluate_extent",
]

Binding = Literal["data", "map", "stride", "step", "size", "param", "section"]
Role = Literal["input", "output", "workspace", "counter"]


@dataclass(frozen=True, slots=True)
class CeilDiv:
    """`ceil(size / by)`: how many blocks of `by` cover the dimension named `size`."""

    size: str
    by: int

    def __str__(self) -> str:
        return f"ceil({self.size} / {self.by})"


Extent = int | str | CeilDiv  # a number, a dimension's name, or a count of blocks


def evaluate_extent(extent: Extent, sizes: dict[str, int]) -> int:
    """The number an extent stands for, given the size of every named dimension."""
    match extent:
        case int():
            return extent
        case str():
            return sizes[extent]
        case CeilDiv(size, by):
            return -(-sizes[size] // by)


MULTIPROCESSORS = "multiprocessors"  # the size that says how many SMs the device has


@dataclass(frozen=True, slots=True)
class Product:
    """A product of extents, or the size named `at_most` where that is less: one component of a grid."""

    factors: tuple[Extent, ...]
    at_most: str = ""

    def __call__(self, sizes: dict[str, int]) -> int:
        product = prod(evaluate_extent(f, sizes) for f in self.factors)
        return min(product, sizes[self.at_most]) if self.at_most else product

    def __str__(self) -> str:
        product = " * ".join(map(str, self.factors)) or "1"
        return f"min({product}, {self.at_most})" if self.at_most else product


@dataclass(frozen=True, slots=True)
class Sections:
    """How many query heads a section has, whose blocks are numbered together: those of about as many heads of K and V as have
    `rows` keys, but of at least `least` and at most `most`; sections are alike, so that none is left with a few heads."""

    rows: int
    least: int
    most: int

    def __call__(self, sizes: dict[str, int]) -> int:
        """For a call of these sizes, none of which is 0 but kv_len."""
        heads = sizes["batch"] * sizes["kv_heads"]
        wanted = max(self.least, min(self.rows // max(sizes["kv_len"], 1), self.most))
        sections = max(1, (heads + wanted // 2) // wanted)
        return -(-heads // sections) * (sizes["q_heads"] // sizes["kv_heads"])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an entry point, in the order of its signature.

    binding "data":   the address of tensor `of`;
    binding "map":    a tensor map of `of` for TMA: [batch, head, row, element], the innermost first, in boxes of 128 bytes by
                      `dim` rows with the 128-byte swizzle, zeros outside;
    binding "stride": the stride, in elements, of dimension `dim` of tensor `of` (0 where it is broadcast);
    binding "step":   the same in bytes;
    binding "size":   the size of the dimension named `of`;
    binding "param":  the value of the spec's `param of`;
    binding "section": the number of heads that `sections` gives.
    """

    name: str
    ctype: str  # "const fp16*", "long long", "int", "float", "bool"
    binding: Binding
    of: str
    dim: int = 0
    sections: Sections | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that the kernels read or write. Workspaces are contiguous; outputs are allocated contiguous if not given.

    A counter is one number that must be 0 before a launch, and is 0 again after it; launches that may run at the same time
    need one each.
    """

    name: str
    role: Role
    dtype: str  # a name of `attngen.spec.dtypes.DTYPES`
    shape: tuple[Extent, ...]
    alignment: int = 0  # bytes that the address and every stride but the last must be a multiple of; 0: the element's size
    unit_stride: bool = False  # the last dimension must have stride 1


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One `__global__` function and how to launch it. A grid with a zero in it means: do not launch."""

    name: str
    parameters: tuple[Parameter, ...]
    grid: tuple[Product, Product, Product]
    block: tuple[int, int, int]
    shared_bytes: int = 0  # dynamic
    shared_buffers: tuple[SharedBuffer, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One emitted file: `text` compiles for `arch` with NVRTC or nvcc, with no header of any toolkit."""

    name: str
    text: str
    arch: str  # "sm_80", "sm_90a", ...
    entry_points: tuple[EntryPoint, ...]
    tensors: tuple[TensorSpec, ...]

    def __repr__(self) -> str:
        kernels = ", ".join(e.name for e in self.entry_points)
        return f"<KernelSource {self.name}.cu for {self.arch}: {len(self.text.splitlines())} lines, kernels {kernels}>"
