"""The range of each index, size and param of a spec for all calls."""

from __future__ import annotations

from attngen.spec.attention import INDICES, SIZES, AttentionSpec
from attngen.spec.bounds import Range
from attngen.spec.dtypes import DType
from attngen.spec.expr import MAX_INT_PARAM, MAX_LENGTH, Type


def name_ranges(spec: AttentionSpec) -> dict[str, Range]:
    """The ranges of the integer names that the expressions of `spec` may use."""
    known: dict[str, Range] = dict.fromkeys(INDICES, (0, MAX_LENGTH - 1))
    known |= dict.fromkeys((*SIZES, *spec.free_dims), (0, MAX_LENGTH))
    if spec.q_heads is not None and spec.kv_heads is not None:
        known |= {"q_heads": (spec.q_heads,) * 2, "kv_heads": (spec.kv_heads,) * 2, "h": (0, spec.q_heads - 1)}
    known |= {p.name: (-MAX_INT_PARAM, MAX_INT_PARAM) for p in spec.params if p.type is Type.INT}
    return known


def dtype_range(dtype: DType) -> Range | None:
    """The range of the integers of `dtype`; None for floats and truth values, whose range is unknown."""
    if dtype.kind != "int":
        return None
    bits = 8 * dtype.bytes
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def element_ranges(spec: AttentionSpec) -> dict[str, Range]:
    """The ranges of the elements of the integer inputs of `spec`."""
    return {i.name: known for i in spec.inputs if (known := dtype_range(i.dtype)) is not None}
