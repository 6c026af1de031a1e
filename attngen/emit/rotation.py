"""The kernels of a file that rotate rows of Q and K before the others, and turn their gradients back after them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attngen.emit import abi
from attngen.emit.program import Extent, Parameter, Sum
from attngen.emit.variant import Function, Variant
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DType

CHUNK_BYTES = 16  # that a thread moves at once
THREADS = 128  # of a block, which has a row of all heads


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

    def constants(self) -> list[tuple[str, str, str]]:
        """The numbers of the code after `chunk`: name, value, comment."""
        rotated = "2 * HALF / CHUNK" if self.interleaved else "HALF / CHUNK"
        return [
            ("HALF", str(self.dim // 2), "pairs of elements that are rotated"),
            ("ROTATED", rotated, "parts of a row that are rotated"),
            ("PARTS", "ROTATED + (HEAD_DIM - 2 * HALF) / CHUNK", "of a row of Q or K"),
        ]

    def primitives(self) -> list[str]:
        """The types and conversions that the code needs."""
        types = sorted({self.dtype.name, self.angles.name})
        return [*(f"type_{t}" for t in types if t != "fp32"), *(f"to_float_{t}" for t in types), f"to_{self.dtype.name}"]


@dataclass(frozen=True, slots=True)
class Turned:
    """Rows that a kernel rotates, or gradients that it turns back in place: from one tensor to another."""

    source: str
    to: str
    index: str  # of a row: q_idx or kv_idx
    length: str  # of the sequence
    most: str  # of any sequence
    heads: str
    position: Function
    position_name: str  # of the function


def chunk(dtype: DType) -> tuple[str, str, str]:
    """The number of elements that a thread moves at once: name, value, comment."""
    return "CHUNK", str(CHUNK_BYTES // dtype.bytes), f"elements of {CHUNK_BYTES} bytes"


def rotation_of(spec: AttentionSpec, plan: Plan) -> Rotation:
    """The rotation of a spec that has one."""
    rotary = spec.rotary
    assert rotary is not None
    angles = spec.input(rotary.cosines).dtype
    return Rotation(spec.dtype, spec.head_dim, rotary.dim, rotary.pairs == "interleaved", angles, plan.direction == "backward")


def turned_rows(spec: AttentionSpec, variant: Variant, names: Iterable[tuple[str, str]]) -> list[Turned]:
    """The rows of the pairs of tensors (from, to) of Q, then of K."""
    found = []
    for source, to in names:
        of_q = source.endswith("Q")
        position = variant.q_position if of_q else variant.k_position
        assert position is not None
        index, length, heads = ("q_idx", "q_len", "q_heads") if of_q else ("kv_idx", "kv_len", "kv_heads")
        name = "q_position" if of_q else "k_position"
        found.append(Turned(source, to, index, length, abi.whole_size(spec, length), heads, position, name))
    return found


def rows_of(turned: list[Turned]) -> Extent:
    """The number of rows of a batch, of all tensors."""
    lengths = [one.length for one in turned]
    return lengths[0] if len(lengths) == 1 else Sum(*lengths)


def tables(spec: AttentionSpec) -> list[Parameter]:
    """The tables as parameters: addresses, strides of positions, and the number of positions, unless the spec states it."""
    rotary = spec.rotary
    assert rotary is not None
    named = list(zip(("cosines", "sines"), rotary.tables, strict=True))
    found = [abi.data(table, spec.input(table).dtype.cuda, name=name) for name, table in named]
    found += [Parameter(f"{name}_stride_p", "long long", "stride", table, 0) for name, table in named]
    found += [Parameter(f"{name}_len", "int", "extent", table, 0) for name, table in named]
    return found
