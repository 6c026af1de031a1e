"""The operator `attngen::append`: new rows of K and V that go to a cache in place, with rotary embeddings.

It returns (the lengths afterwards, q_rotated). Tensors are [batch, length, heads, size], or a cache is in pages, [pages,
page_size, heads, size]. Row i of k and v goes to row lengths[b] + i of sequence b, and is not written if the cache has no such
row, or the page table no such page. With `cos` and `sin`, [positions, rotary_dim / 2], k is rotated on the way, and q_rotated
is q rotated. `q_at` states the positions of q: those of the "new rows", that of the "first new row", or those at the "end" of
the sequence. Without `cos` and `sin`, q_rotated has no element. `attngen.emit.append.Append` has the rest.

Caches of 8 bits take rows of 16 and 32 bits, divided by `k_scale` and `v_scale`, fp32 [batch, length, heads], where 1 stands
for any size; without them, as they are. They are rounded to nearest, ties to even; what is beyond the largest number becomes
that number, and NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError, ArrayView, check_one_device
from attngen.device.binding import Bound, bind, sizes_of
from attngen.device.lazy_kernel import DeferredKernel
from attngen.device.params import Number
from attngen.device.protocol import Device, Kernel
from attngen.device.select import device_by_name
from attngen.diagnostics import counted
from attngen.emit.append import Append, PlaceOfRows, append_program
from attngen.emit.program import Program
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Type
from attngen.spec.rotary import ROTARY_MULTIPLE
from attngen.torch.copies import ROW_BYTES, has_whole_rows, in_place
from attngen.torch.description import CACHE_TYPES, dtype_name
from attngen.torch.layout import check_tensors
from attngen.torch.operator import LIBRARY, operator
from attngen.torch.runtime import Runtime, name_of

Pair = tuple[Tensor, Tensor]

SCHEMA = (
    "append(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? page_table, "
    "Tensor? cos, Tensor? sin, bool interleaved, str q_at, Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)"
)


class Turn(NamedTuple):
    """How rows are rotated: cosines and sines [positions, rotary_dim / 2], without which they are not, and where rows of Q
    stand. `names` are the caller's for the tables."""

    tables: tuple[Tensor, Tensor] | None = None
    interleaved: bool = False
    q_at: PlaceOfRows = "new rows"
    names: tuple[str, str] = ("rotary_cos", "rotary_sin")


NO_TURN = Turn()


class Scales(NamedTuple):
    """What numbers of 8 bits of a cache are multiplied with to be keys and values, fp32 [batch, length, heads] of the new rows,
    where 1 stands for any size; None: with 1."""

    k: Tensor | None = None
    v: Tensor | None = None


NO_SCALES = Scales()


@dataclass(frozen=True, slots=True)
class CompiledAppend:
    """The kernel of an `Append` on a device, compiled by the first call."""

    kernel: Kernel
    device: Device

    @property
    def source(self) -> Program:
        """The generated CUDA and its ABI."""
        return self.kernel.source

    def number_names(self, kind: Type) -> tuple[str, ...]:
        """A call has no numbers."""
        return ()

    def bind(self, arrays: Mapping[str, ArrayView], params: Mapping[str, Number]) -> Bound:
        """A call with `arrays`, inputs and outputs. Raises ArgumentError."""
        return bind(self.kernel, sizes_of(self.source, self.device, arrays), arrays, params)


@lru_cache(maxsize=256)
def _runtime(append: Append, device: torch.device) -> Runtime[CompiledAppend]:
    place = device_by_name(name_of(device))
    return Runtime(CompiledAppend(DeferredKernel(place, append_program(append, place.arch)), place))


def run(*arguments: Any) -> Pair:
    """(lengths_after, q_rotated), with the rows in the caches."""
    q, k, v, k_cache, v_cache, lengths, page_table, cos, sin, interleaved, q_at, *scales = arguments
    if not k.shape[1] and (cos is None or not q.shape[1]):  # no block would write the lengths
        return lengths.clone(), q.new_empty((0,)) if cos is None else torch.empty_like(q)
    q, k, v = in_place(q), in_place(k), in_place(v)
    append = Append(
        DTYPES[dtype_name(q.dtype)],
        q.shape[3],
        v.shape[3],
        page_table is not None,
        0 if cos is None else 2 * cos.shape[1],
        interleaved and cos is not None,
        cast(PlaceOfRows, q_at) if cos is not None else "new rows",
        None if cos is None else DTYPES[dtype_name(cos.dtype)],
        CACHE_TYPES[k_cache.dtype] if k_cache.dtype is not q.dtype else None,
    )
    if append.cache is not None:
        given = (*scales, None, None)[:2]
        scales = [q.new_ones((1, 1, 1), dtype=torch.float32) if one is None else one for one in given]
    inputs = [k, v, lengths, *scales, *([] if page_table is None else [page_table]), *([] if cos is None else [cos, sin, q])]
    found = _runtime(append, q.device)(inputs, outputs=(k_cache, v_cache, *(None,) * (1 if cos is None else 2)))
    return found[2], q.new_empty((0,)) if cos is None else found[3]


def fake(*arguments: Any) -> Pair:
    """Shapes and strides alone."""
    q, _, _, _, _, lengths, _, cos, *_ = arguments
    return lengths.new_empty(lengths.shape), q.new_empty((0,)) if cos is None else torch.empty_like(q)


def _batched(*_: object) -> NoReturn:
    raise ArgumentError(
        "rows are appended in place, and torch.vmap has no place for those of its samples; add them to the batch"
    )


_operator = operator(SCHEMA, run, fake)
torch.library.register_vmap("attngen::append", _batched, lib=LIBRARY)


def appended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    turn: Turn = NO_TURN,
    scales: Scales = NO_SCALES,
) -> Pair:
    """(lengths afterwards, q), after k and v were written to the caches: the operator above, with checks. Without tables q is
    the given one. `scales` are those of caches of 8 bits. Raises ArgumentError."""
    tables = turn.tables
    for name, one in (("q", q), ("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if one.dim() != 4:
            raise ArgumentError(f"`{name}` has {counted(one.dim(), 'dimension')}; expected [batch, length, heads, size]")
        if one.shape[3] % 8:
            raise ArgumentError(
                f"`{name}` has a head size of {one.shape[3]}; rows are appended 16 bytes at a time: expected a multiple of 8"
            )
    for name, one in (("k_cache", k_cache), ("v_cache", v_cache)):
        size = ROW_BYTES * one.element_size() // q.element_size()
        if not has_whole_rows(one, size):
            raise ArgumentError(
                f"`{name}` is written in place, {size} bytes at a time; its rows must be contiguous and aligned to {size} bytes"
            )
    if tables is None:
        return _operator(q, k, v, k_cache, v_cache, lengths, page_table, None, None, False, "new rows", *scales)[0], q
    _check_tables(tables, turn.names, q)
    cosines, sines = (t if t.stride(1) == 1 else t.contiguous() for t in tables)
    how = (turn.interleaved, turn.q_at, *scales)
    return _operator(q, k, v, k_cache, v_cache, lengths, page_table, cosines, sines, *how)


def _check_tables(tables: tuple[Tensor, Tensor], names: tuple[str, str], q: Tensor) -> None:
    """Raises ArgumentError, ArgumentTypeError for cosines and sines that rotate no rows like q's."""
    check_tensors(**dict(zip(names, tables, strict=True)))
    cosines, sines = tables
    size = 2 * cosines.shape[-1] if cosines.dim() == 2 else 0
    if not size or size % ROTARY_MULTIPLE or size > q.shape[3]:
        raise ArgumentError(
            f"`{names[0]}` is {list(cosines.shape)}; expected [positions, rotary_dim / 2], where rotary_dim is a multiple of "
            f"{ROTARY_MULTIPLE} and at most the head size, {q.shape[3]}"
        )
    if sines.shape != cosines.shape:
        raise ArgumentError(f"`{names[1]}` is {list(sines.shape)}; expected {list(cosines.shape)}, as `{names[0]}` is")
    if cosines.shape[0] == 0:
        raise ArgumentError(f"`{names[0]}` has no row; pass cosines and sines of at least one position")
    dtype_name(cosines.dtype, names[0])
    for name, one in zip(names, tables, strict=True):
        if one.dtype is not cosines.dtype:
            raise ArgumentTypeError(f"`{name}` has elements of {one.dtype}; expected {cosines.dtype}, as `{names[0]}` has")
        check_one_device(name, one.device, "q", q.device)
