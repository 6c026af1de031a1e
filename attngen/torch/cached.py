"""What an attention reads of a cache of keys and values: new rows appended and rotated, and where each sequence lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.device.params import input_names, number_names
from attngen.spec.attention import AttentionSpec, Storage
from attngen.spec.cached import of_cache, of_last_rows
from attngen.spec.check import check
from attngen.spec.dropout import without_dropout
from attngen.spec.expr import Type, names_in
from attngen.spec.print_attn import expression_to_text
from attngen.spec.rotary import IN_ORDER, without_rotary
from attngen.torch.append import NO_SCALES, NO_TURN, Scales, Turn, appended
from attngen.torch.arguments import Lists, NamedArguments
from attngen.torch.check_cache import Place, check_cache, check_length
from attngen.torch.description import CACHE_TYPES, constant, one_line
from attngen.torch.front import Front
from attngen.torch.layout import padded
from attngen.torch.private import autocasts
from attngen.torch.runtime import parsed
from attngen.torch.stored import DENSE, Stored


class Cache(NamedTuple):
    """Rows, and keys and values as their attention reads them: padded, [batch, length, kv_heads, size], or in pages, [pages,
    page_size, kv_heads, size]. They are dense if all rows are keys of their sequence."""

    q: Tensor
    keys: Tensor
    values: Tensor
    lengths: Stored


class Reader(NamedTuple):
    """What reads a cache: `attention`(cache), or `attention`(cache, only_checks=True), which raises if it would be refused.
    Whether it is depends on `inputs` and `key` too; `front` remembers which calls are right."""

    attention: Callable[..., Any]
    front: Front
    inputs: Sequence[Tensor]
    key: object


def attended(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: Sequence[Any],
    turn: Turn | None,
    place: Place,
    reader: Reader,
    as_dense: bool = False,
    v_in_k: bool = False,
    scales: Scales = NO_SCALES,
) -> Any:
    """What `reader` makes of the cache after `new`, keys and values or None twice, was appended; all are [batch, length,
    heads, size]. `as_dense`, keys are copied from pages, and values that no sequence has are 0. `v_in_k`: values are a part of
    keys. New rows are divided by `scales` where the cache has 8 bits. Raises ArgumentError before it writes."""
    k, v = new
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or autocasts():
        q, k, v = _in_type_of_cache(q, k, v, k_cache)

    def check() -> None:
        check_cache(q, k_cache, v_cache, k, v, place)
        if k is not None and not is_compiling:  # torch.compile refuses a call before it runs
            reader.attention(_stored(q, *_places(q, k_cache, v_cache, place), place, as_dense), only_checks=True)

    if is_compiling:
        check()
    elif k is None:
        reader.front.once((q, k_cache, v_cache, *place.tensors), place.kinds, check, writes=False)
    else:
        given = (q, k_cache, v_cache, k, v, *place.tensors, *reader.inputs, *(one for one in scales if one is not None))
        reader.front.once(given, (reader.key, place.kinds, *map(type, scales)), check, writes=True)
    keys, values, pages, used, longest = _places(q, k_cache, v_cache, place)
    check_length(place.cache_seqlens, longest)
    if k is not None or turn is not None:
        if k is None:  # rows of Q alone are rotated
            k, v = (q.new_empty((q.shape[0], 0, *cache.shape[2:])) for cache in (keys, values))
        append = _appended_to_copies if keys.shape[3] % 8 or values.shape[3] % 8 else appended
        if v_in_k:  # rows of K are written once, in two parts; nothing is turned
            (part, rest), (first, last) = (rows.split((rows.shape[3] - 8, 8), 3) for rows in (k, keys))
            used, _ = append(q[..., :-8], part, rest, first, last, used, pages, NO_TURN, Scales(scales.k, scales.k))
        else:
            used, q = append(q, k, v, keys, values, used, pages, NO_TURN if turn is None else turn, scales)
    if as_dense:
        return reader.attention(_dense(q, keys, values, pages, used, place.cache_leftpad))
    return reader.attention(_stored(q, keys, values, pages, used, longest, place))


def _places(q: Tensor, k_cache: Tensor, v_cache: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int]:
    """Keys and values, the page table or None, the lengths of sequences, and a length that none exceeds."""
    cache_seqlens, cache_batch_idx, _, block_table = place
    pages = block_table if cache_batch_idx is None else cache_batch_idx.unsqueeze(1)  # a cache is one page
    if pages is not None and pages.stride(1) != 1:
        pages = pages.contiguous()
    if pages is None and k_cache.shape[0] > q.shape[0]:
        k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    longest = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    return k_cache, v_cache, pages, _lengths(longest if cache_seqlens is None else cache_seqlens, q), longest


def _stored(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None, used: Tensor, longest: int, place: Place, as_dense: bool = False
) -> Cache:
    """The cache as kernels read it, in place; `as_dense`, tensors of the sizes of what `_dense` returns."""
    leftpad = place.cache_leftpad
    if as_dense:
        if pages is not None:
            k, v = (pool.new_empty((1, 1, *pool.shape[2:])).expand(q.shape[0], longest, -1, -1) for pool in (k, v))
        return Cache(q, k, v, Stored("dense", (used,), (), leftpad))
    if pages is not None:
        return Cache(q, k, v, Stored("paged", (pages, used), (longest,), leftpad))
    all_keys = place.cache_seqlens is None and leftpad is None
    return Cache(q, k, v, DENSE if all_keys else Stored("padded", (used,), (longest,), leftpad))


def _dense(q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None, used: Tensor, cache_leftpad: Tensor | None) -> Cache:
    """Keys copied from pages, and values of which those that no sequence has are 0."""
    if pages is not None:
        k, v = (pool[pages.long().clamp(0, pool.shape[0] - 1)].flatten(1, 2) for pool in (k, v))
    begin = 0 if cache_leftpad is None else cache_leftpad[:, None]
    key = torch.arange(v.shape[1], device=q.device)
    numbers = v.to(q.dtype) if v.dtype in CACHE_TYPES else v  # torch fills no numbers of 8 bits
    v = numbers.masked_fill(((key < begin) | (key >= used[:, None]))[..., None, None], 0).to(v.dtype)
    return Cache(q, k, v, Stored("dense", (used,), (), cache_leftpad))


def _appended_to_copies(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """`appended` for head sizes that are no multiple of 8, as a kernel writes 16 bytes at a time: copies are copied back."""
    copies = padded(k_cache), padded(v_cache)
    used, turned = appended(padded(q), padded(k), padded(v), *copies, *others)
    for cache, copied in zip((k_cache, v_cache), copies, strict=True):
        cache.copy_(copied[..., : cache.shape[3]])
    return used, turned[..., : q.shape[3]]


def _in_type_of_cache(
    q: Tensor, k: Tensor | None, v: Tensor | None, cache: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, k and v; under autocast in the cache's element type, in which rows are appended, or in autocast's beside 8 bits."""
    kind = q.device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return q, k, v
    wanted = torch.get_autocast_dtype(kind) if cache.dtype in CACHE_TYPES else cache.dtype
    k, v = (None if one is None else one.to(wanted) for one in (k, v))
    return q.to(wanted), k, v


def _lengths(cache_seqlens: int | Tensor, q: Tensor) -> Tensor:
    """`cache_seqlens` as a tensor [batch] of neighbours."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens if cache_seqlens.stride(0) == 1 else cache_seqlens.contiguous()
    return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)


class Decoding:
    """The arguments of a spec in a cache: plain values, which torch.compile can follow."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._arguments = NamedArguments(spec)  # arguments of a call, with tables of a rotation
        self._storage = spec.kernel.storage
        rotary, rest = spec.rotary, without_rotary(spec)
        of_inputs = [name in input_names(rest) for name in self._arguments.inputs]
        of_numbers = ([n in number_names(rest, kind) for n in number_names(spec, kind)] for kind in (Type.INT, Type.FLOAT))
        self._kept = (of_inputs, *of_numbers)
        self._tables: tuple[int, ...] = ()
        self._refused = ""
        if rotary is not None:
            self._tables = tuple(self._arguments.inputs.index(table) for table in rotary.tables)
            self._table_names = rotary.tables
            self._interleaved = rotary.pairs == "interleaved"
            if not (rotary.has_usual_positions or rotary.positions == IN_ORDER):
                self._refused = ", ".join(map(expression_to_text, rotary.positions))

    def lists(self, named: Mapping[str, object], captured: Mapping[str, Tensor]) -> Lists:
        """The arguments of a call: see `NamedArguments.lists`. Raises ArgumentError."""
        if self._storage != "dense":
            raise ArgumentError(f"the spec states storage {self._storage}; leave it out: a call's arguments say it")
        return self._arguments.lists(named, captured)

    def turn(self, inputs: Sequence[Tensor]) -> Turn | None:
        """The rotation of a call with these inputs. Raises ArgumentError."""
        if not self._tables:
            return None
        if self._refused:
            raise ArgumentError(
                f"the spec rotates rows at positions {self._refused}; in a cache, key k has position k, and the last row has "
                "that of the last key"
            )
        cosines, sines = (inputs[i] for i in self._tables)
        return Turn((cosines, sines), self._interleaved, "end", self._table_names)

    def kept(self, *lists: Sequence[Any]) -> list[list[Any]]:
        """Those of inputs, ints and floats that the attention of rotated rows reads."""
        return [[one for one, kept in zip(some, are, strict=True) if kept] for some, are in zip(lists, self._kept, strict=True)]


def decoding_of(spec: AttentionSpec) -> Decoding:
    """The arguments of `spec` in a cache, where nothing is dropped."""
    return Decoding(_undropped(spec))


def _undropped(spec: AttentionSpec) -> AttentionSpec:
    """`spec` without dropout, and without the param that only says how much is dropped."""
    rest, p = without_dropout(spec), spec.dropout
    expressions = [*rest.expressions.values()]
    expressions += rest.rotary.positions if rest.rotary is not None else ()
    unused = names_in(p) - names_in(*expressions) if p is not None else frozenset()
    return replace(rest, params=tuple(param for param in rest.params if param.name not in unused))


@constant
def decoding_text(text: str, known: tuple[str, ...], storage: Storage, page_size: int | None) -> str:
    """The text of the attention of `text` for the last rows of sequences, whose keys are a cache's: `known` is what a mask says
    of them. Rows are rotated already, and nothing is dropped.

    Raises DiagnosticError for an index that nothing keeps in its tensor in a cache.
    """
    spec = without_rotary(_undropped(parsed(text)))
    spec = of_cache(of_last_rows(spec), known)
    spec = replace(spec, kernel=replace(spec.kernel, storage=storage, page_size=page_size))
    check(spec)
    return one_line(spec)
