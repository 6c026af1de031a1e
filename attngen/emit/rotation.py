"""The kernels of a file that rotate rows of Q and K before the others, and turn their gradients back after them."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi
from attngen.emit.constants import ConstantLine
from attngen.emit.kernel_maker import KernelMaker
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Extent, Parameter, Sum
from attngen.emit.variant import Function
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DType

CHUNK_BYTES = 16  # a thread moves so many at once
THREADS = 128  # per block; a block has a row of all heads
ROTATE, TURN_BACK = "rotate", "turn_back"  # the suffixes of kernels


@dataclass(frozen=True, slots=True)
class Rotation:
    """How rows [head_dim] of `dtype` are rotated: their first `dim` elements, by cosines and sines of the type `angles`.

    With `turns_back`, the code can turn them back too.
    """

    dtype: DType
    head_dim: int
    dim: int
    interleaved: bool
    angles: DType
    turns_back: bool = False

    @property
    def pairs(self) -> str:
        """Which elements are rotated together."""
        return "two neighbours" if self.interleaved else "elements i and i + HALF"

    def constants(self) -> list[ConstantLine]:
        """The numbers of the code after `chunk`."""
        rotated = "2 * HALF / CHUNK" if self.interleaved else "HALF / CHUNK"
        return [
            ConstantLine("HALF", self.dim // 2, "pairs of elements that are rotated"),
            ConstantLine("ROTATED", rotated, "parts of a row that are rotated"),
            ConstantLine("PARTS", "ROTATED + (HEAD_DIM - 2 * HALF) / CHUNK", "of a row of Q or K"),
        ]


@dataclass(frozen=True, slots=True)
class Turned:
    """Rows that a kernel rotates, or gradients that it turns back in place: from one tensor to another."""

    source: str
    to: str
    index: str  # index of a row: q_idx or kv_idx
    length: str  # length of the sequence
    most: str  # length of the longest sequence
    heads: str
    position: Function
    position_name: str  # name of the position's function


@dataclass(frozen=True, slots=True)
class RotatingKernel:
    """The kernel that rotates rows, or that turns gradients back."""

    kernel: KernelText
    turned: list[Turned]
    turn: str  # the argument that says in which direction, where the file has both


def chunk(dtype: DType) -> ConstantLine:
    """The number of elements that a thread moves at once."""
    return ConstantLine("CHUNK", CHUNK_BYTES // dtype.bytes, f"elements of {CHUNK_BYTES} bytes")


def rotation_of(spec: AttentionSpec, plan: Plan) -> Rotation | None:
    """The rotation by kernels of the file, if it has any."""
    rotary = spec.rotary
    if rotary is None or not plan.rotated:
        return None
    angles = spec.input(rotary.cosines).dtype
    return Rotation(spec.dtype, spec.head_dim, rotary.dim, rotary.pairs == "interleaved", angles, plan.direction == "backward")


def rotating_kernels(maker: KernelMaker) -> list[RotatingKernel]:
    """The kernel before the others, and in a backward that after them."""
    plan, back = maker.plan, maker.plan.direction == "backward"
    if not plan.rotated:
        return []
    found = [_rotating(maker, ROTATE, [(name, abi.rotated(name)) for name in plan.rotated], ", 1.0f" if back else "")]
    gradients = [f"d{name}" for name in plan.rotated if plan.wants(name.lower())]
    if gradients:
        found.append(_rotating(maker, TURN_BACK, [(name, name) for name in gradients], ", -1.0f"))
    return found


def _rotating(maker: KernelMaker, suffix: str, names: list[tuple[str, str]], turn: str) -> RotatingKernel:
    """The kernel that turns rows from the first to the second tensor of each pair."""
    turned = [_turned(maker, source, to) for source, to in names]
    tensors = list(dict.fromkeys(name for pair in names for name in pair))
    positions = [one.position for one in turned]
    parameters = [
        *(maker.pointer(name, writable=maker.tensors[name].is_written) for name in tensors),
        *tables(maker.spec),
        *(p for name in tensors for p in maker.strides(name, "bhs")),
        *maker.sizes(),
        *maker.captured(*positions, scale=False),
    ]
    lengths = [one.length for one in turned]
    rows: Extent = lengths[0] if len(lengths) == 1 else Sum(*lengths)
    kernel = maker.kernel(suffix, (rows, "batch"), parameters, THREADS, "ROTARY_THREADS", reads_prepared=False)
    return RotatingKernel(kernel, turned, turn)


def _turned(maker: KernelMaker, source: str, to: str) -> Turned:
    if source.endswith("Q"):
        name, position, index, length, heads = "q_position", maker.variant.q_position, "q_idx", "q_len", "q_heads"
    else:
        name, position, index, length, heads = "k_position", maker.variant.k_position, "kv_idx", "kv_len", "kv_heads"
    assert position is not None
    return Turned(source, to, index, length, abi.whole_size(maker.spec, length), heads, position, name)


def tables(spec: AttentionSpec) -> list[Parameter]:
    """The tables as parameters: addresses, strides of positions, and the number of positions, unless the spec states it."""
    rotary = spec.rotary
    assert rotary is not None
    named = list(zip(("cosines", "sines"), rotary.tables, strict=True))
    found = [abi.data(table, spec.input(table).dtype.cuda, name=name) for name, table in named]
    found += [Parameter(f"{name}_stride_p", "long long", "stride", table, 0) for name, table in named]
    found += [Parameter(f"{name}_len", "int", "extent", table, 0) for name, table in named]
    return found
