"""ATen operators that expressions lack, by those that they have: torch's own decompositions, and a few in the place of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.language.tracer import TraceError
from attngen.torch.aten import meaning_of
from attngen.torch.private import OpOverload, decomposition_table

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., object]]  # functions by the operators that they replace


def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    return [x.narrow(dim, start, min(size, x.shape[dim] - start)) for start in range(0, x.shape[dim], size)]


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    return [x.narrow(dim, sum(sizes[:n]), size) for n, size in enumerate(sizes)]


def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: int | list[int] | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """torch's, with its derivative 0 at 0."""
    dim, x = dim or [], x.abs().to(dtype or x.dtype)
    if math.isinf(ord):
        return x.amax(dim, keepdim) if ord > 0 else x.amin(dim, keepdim)
    if ord == 0:
        return (x != 0).sum(dim, keepdim).to(x.dtype)
    total = (x**ord).sum(dim, keepdim)
    return torch.where(total > 0, torch.where(total > 0, total, 1.0) ** (1 / ord), 0.0)


def _power(base: object, exponent: Tensor) -> Tensor:
    """torch's integer of a power of two and an integer: a shift."""
    if type(base) is not int or base < 2 or base & (base - 1) or exponent.is_floating_point():
        return NotImplemented
    return torch.where(exponent < 0, 0, 1 << exponent * (base.bit_length() - 1))


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """How many boundaries are below `x`, by bisection."""
    count = boundaries.shape[0]
    found = torch.zeros(x.shape, dtype=torch.int32 if out_int32 else torch.int64, device=x.device)
    for bit in reversed(range(count.bit_length())):
        more = found + 2**bit
        last = aten.index(boundaries, [torch.clamp(more - 1, max=count - 1)])
        found = torch.where((more <= count) & (last <= x if right else last < x), more, found)
    return found


def _searchsorted(
    boundaries: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: object = None,
) -> Tensor:
    if boundaries.dim() != 1 or sorter is not None:
        raise TraceError("torch.searchsorted is available for boundaries of one dimension, without `sorter`")
    return _bucketize(x, boundaries, out_int32=out_int32, right=right or side == "right")


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """torch's, whose shape for tensors without memory lacks the dimensions of the others if an index on the CPU has none."""
    ranks = {i.dim() for i in indices if i is not None}
    if len(ranks) == 1 or 0 not in ranks:
        return NotImplemented
    return aten.index(x, [i if i is None or i.dim() else i.reshape(1) for i in indices])


OWN: Decompositions = {
    aten.index.Tensor: _index,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.pow.Scalar: _power,
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
}


@functools.cache
def decompositions() -> Decompositions:
    """The function that replaces each operator without a meaning."""
    theirs = {
        operator: function
        for operator, function in decomposition_table.items()
        if isinstance(operator, OpOverload)
        and not operator._schema.is_mutable
        and meaning_of(operator._schema.name.removeprefix("aten::")) is None
    }
    return {**theirs, **OWN}
