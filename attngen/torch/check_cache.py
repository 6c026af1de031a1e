"""Checks of a call that reads a cache, before anything is written to it: messages name the caller's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError, check_one_device
from attngen.diagnostics import counted
from attngen.torch.append import NO_SCALES, Scales
from attngen.torch.description import CACHE_TYPES
from attngen.torch.layout import check_tensors


class Place(NamedTuple):
    """Where sequences lie in a cache: arguments of `attngen.torch.flash_attn_with_kvcache`."""

    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are given as tensors."""
        return [one for one in self if isinstance(one, torch.Tensor)]

    @property
    def kinds(self) -> tuple[type, ...]:
        """The type of each argument: which of them are `tensors`."""
        return tuple(map(type, self))


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, place: Place) -> None:
    """Raises ArgumentError for tensors that do not fit each other, ArgumentTypeError for other types. All are [batch, length,
    heads, size], or the caches are [pages, page_size, heads, size]."""
    _check_given(k, v, place)
    new = {} if k is None or v is None else {"k": k, "v": v}
    for name, one in {"q": q, **new}.items():
        _check_rows(name, one, q)
    check_sizes(k_cache=k_cache, v_cache=v_cache)
    quantized = k_cache.dtype in CACHE_TYPES and q.dtype not in CACHE_TYPES
    for name, one in {"k_cache": k_cache, "v_cache": v_cache}.items():
        _check_rows(name, one, k_cache if quantized else q, "k_cache" if quantized else "q")
    _check_caches(q, k_cache, v_cache)
    for (name, one), cache in zip(new.items(), (k_cache, v_cache), strict=bool(new)):
        wanted = (q.shape[0], new["k"].shape[1], *cache.shape[2:])
        if tuple(one.shape) != wanted:
            raise ArgumentError(
                f"`{name}` is {list(one.shape)} of batch, length, heads and size; expected {list(wanted)}, to be appended to "
                f"`{name}_cache`"
            )
    _check_place(q, k_cache, place)


def scales_of(q: Tensor, k_cache: Tensor, new_len: int, **named: object) -> Scales:
    """The scales of K and of V, by the caller's names for them: each None, a number, or a tensor that broadcasts to [batch,
    length, heads]. Raises ArgumentError for others, and if the cache has none."""
    given = {name: scale for name, scale in named.items() if scale is not None}
    if not given:
        return NO_SCALES
    if k_cache.dtype not in CACHE_TYPES:
        found = str(k_cache.dtype).removeprefix("torch.")
        raise ArgumentError(
            f"`{next(iter(given))}` is of caches of 8 bits, and `k_cache` has elements of {found}; leave it out"
        )
    shape = (q.shape[0], new_len, k_cache.shape[2])
    return Scales(*(None if one is None else _scale(name, one, shape, q) for name, one in named.items()))


def descales_of(q: Tensor, k: Tensor, batch: int | None = None, **named: object) -> list[Tensor | None]:
    """The scales of keys, values and queries of `batch` sequences (by default as many as q has), by the caller's names: each
    None, or fp32 [batch or 1, heads or 1]. Raises ArgumentError for others, and if keys, or queries, have not 8 bits."""
    if all(scale is None for scale in named.values()):
        return [None] * len(named)
    check_tensors(q=q, k=k)
    for name in (name for name, scale in named.items() if scale is not None):
        whose, what, tensor = ("q", "queries", q) if name == "q_descale" else ("k", "keys and values", k)
        if tensor.dtype not in CACHE_TYPES:
            found = str(tensor.dtype).removeprefix("torch.")
            raise ArgumentError(f"`{name}` is of {what} of 8 bits, and `{whose}` has elements of {found}; leave it out")
    shape = (q.shape[0] if batch is None else batch, 1, k.shape[-2] if k.dim() > 1 else 1)
    return [None if scale is None else _scale(name, by_row(scale), shape, q).squeeze(1) for name, scale in named.items()]


def by_row(descale: object) -> object:
    """[batch, kv_heads] as [batch, 1, kv_heads]."""
    return descale.unsqueeze(1) if isinstance(descale, torch.Tensor) and descale.dim() == 2 else descale


def _scale(name: str, scale: object, shape: Sequence[int], q: Tensor) -> Tensor:
    """A scale as a tensor fp32 of three dimensions."""
    if isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool):
        return torch.full((1, 1, 1), float(scale), dtype=torch.float32, device=q.device)
    if not isinstance(scale, torch.Tensor):
        raise ArgumentTypeError(f"`{name}` is a {type(scale).__name__}; expected a number or a tensor")
    if scale.dtype is not torch.float32:
        raise ArgumentTypeError(f"`{name}` has elements of {str(scale.dtype).removeprefix('torch.')}; expected float32")
    check_one_device(name, scale.device, "q", q.device)
    whole = scale[(None,) * (3 - scale.dim())] if scale.dim() < 3 else scale
    if whole.dim() > 3 or any(found not in (1, size) for found, size in zip(whole.shape, shape, strict=True)):
        raise ArgumentError(
            f"`{name}` is {list(scale.shape)}; expected what broadcasts to {list(shape)} of batch, length and heads"
        )
    return whole


def check_sizes(**named: Tensor) -> None:
    """Raises ArgumentError for rows of 8 bits that are no whole parts."""
    for name, one in named.items():
        if one.dtype in CACHE_TYPES and one.shape[-1] % 8:
            raise ArgumentError(f"`{name}` has 8 bits and a head size of {one.shape[-1]}; expected a multiple of 8")


def _check_given(k: Tensor | None, v: Tensor | None, place: Place) -> None:
    if (k is None) != (v is None) or (k is not None and place.cache_seqlens is None):
        raise ArgumentError(
            "appending needs `k`, `v` and `cache_seqlens`, the length before it; at least one of them is missing"
        )
    if place.block_table is not None and place.cache_batch_idx is not None:
        raise ArgumentError(
            "`block_table` and `cache_batch_idx` were both given; pass one: a page table already says where a sequence is"
        )


def _check_rows(name: str, rows: Tensor, q: Tensor, like: str = "q") -> None:
    if rows.dim() != 4:
        raise ArgumentError(f"`{name}` has {counted(rows.dim(), 'dimension')}; expected 4, of batch, length, heads and size")
    if rows.dtype is not q.dtype:
        found, expected = (str(dtype).removeprefix("torch.") for dtype in (rows.dtype, q.dtype))
        raise ArgumentTypeError(f"`{name}` has elements of {found}; expected {expected}, as `{like}` has. Convert one of them")
    check_one_device(name, rows.device, like, q.device)


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    q_heads, kv_heads, size = q.shape[2], k_cache.shape[2], q.shape[3]
    if not kv_heads or q_heads % kv_heads:
        raise ArgumentError(f"{q_heads} query heads of `q` cannot share {kv_heads} key/value heads of `k_cache`")
    if k_cache.shape[3] != size:
        raise ArgumentError(f"`k_cache` has a head size of {k_cache.shape[3]}; expected {size}, as `q` has")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ArgumentError(
            f"`v_cache` is {list(v_cache.shape)} of batch or pages, length, heads and size, and `k_cache` "
            f"{list(k_cache.shape)}; expected the same, up to the size"
        )


def _check_place(q: Tensor, k_cache: Tensor, place: Place) -> None:
    batch, (places, rows) = q.shape[0], k_cache.shape[:2]
    shapes = {"cache_seqlens": (batch,), "cache_batch_idx": (batch,), "cache_leftpad": (batch,), "block_table": (batch, -1)}
    for (name, shape), numbers in zip(shapes.items(), place, strict=True):
        is_length = name == "cache_seqlens" and isinstance(numbers, (int, np.integer)) and not isinstance(numbers, bool)
        if numbers is not None and not is_length:
            _check_numbers(name, numbers, shape, q)
    if place.block_table is not None:
        rows *= place.block_table.shape[1]
    elif place.cache_batch_idx is None and places < batch:
        raise ArgumentError(f"`k_cache` has room for {places} sequences; `q` has {batch}")
    check_length(place.cache_seqlens, rows)


def check_length(length: object, rows: int) -> None:
    """Raises ArgumentError for a number of keys, if `length` is one, for which a cache has no room."""
    if isinstance(length, (int, np.integer)) and not 0 <= length <= rows:
        raise ArgumentError(f"`cache_seqlens` is {length}; a cache has room for {rows} keys: expected 0 to {rows}")


def _check_numbers(name: str, numbers: object, shape: Sequence[int], q: Tensor) -> None:
    if not isinstance(numbers, torch.Tensor):
        expected = "an int or a tensor" if name == "cache_seqlens" else "a tensor"
        raise ArgumentTypeError(f"`{name}` is a {type(numbers).__name__}; expected {expected} of int32")
    if numbers.dtype is not torch.int32:
        raise ArgumentTypeError(f"`{name}` has elements of {str(numbers.dtype).removeprefix('torch.')}; expected int32")
    if numbers.dim() != len(shape) or numbers.shape[0] != shape[0]:
        axes = "batch, max_pages" if len(shape) == 2 else "batch"
        raise ArgumentError(f"`{name}` is {list(numbers.shape)}; expected [{axes}], and `q` has a batch of {shape[0]}")
    check_one_device(name, numbers.device, "q", q.device)
