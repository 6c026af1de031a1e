"""Checks of a call that reads a cache, before anything is written to it: messages name the caller's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError, check_one_device
from attngen.diagnostics import counted


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
    new: dict[str, Any] = {} if k is None else {"k": k, "v": v}
    for name, one in {"q": q, "k_cache": k_cache, "v_cache": v_cache, **new}.items():
        _check_rows(name, one, q)
    _check_caches(q, k_cache, v_cache)
    for (name, one), cache in zip(new.items(), (k_cache, v_cache), strict=bool(new)):
        wanted = (q.shape[0], new["k"].shape[1], *cache.shape[2:])
        if tuple(one.shape) != wanted:
            raise ArgumentError(
                f"`{name}` is {list(one.shape)} of batch, length, heads and size; expected {list(wanted)}, to be appended to "
                f"`{name}_cache`"
            )
    _check_place(q, k_cache, place)


def _check_given(k: Tensor | None, v: Tensor | None, place: Place) -> None:
    if (k is None) != (v is None) or (k is not None and place.cache_seqlens is None):
        raise ArgumentError(
            "appending needs `k`, `v` and `cache_seqlens`, the length before it; at least one of them is missing"
        )
    if place.block_table is not None and place.cache_batch_idx is not None:
        raise ArgumentError(
            "`block_table` and `cache_batch_idx` were both given; pass one: a page table already says where a sequence is"
        )


def _check_rows(name: str, rows: Tensor, q: Tensor) -> None:
    if rows.dim() != 4:
        raise ArgumentError(f"`{name}` has {counted(rows.dim(), 'dimension')}; expected 4, of batch, length, heads and size")
    if rows.dtype is not q.dtype:
        found, expected = (str(dtype).removeprefix("torch.") for dtype in (rows.dtype, q.dtype))
        raise ArgumentTypeError(f"`{name}` has elements of {found}; expected {expected}, as `q` has. Convert one of them")
    check_one_device(name, rows.device, "q", q.device)


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


def check_length(length: Any, rows: int) -> None:
    """Raises ArgumentError for a number of keys, if `length` is one, for which a cache has no room."""
    if isinstance(length, (int, np.integer)) and not 0 <= length <= rows:
        raise ArgumentError(f"`cache_seqlens` is {length}; a cache has room for {rows} keys: expected 0 to {rows}")


def _check_numbers(name: str, numbers: Any, shape: Sequence[int], q: Tensor) -> None:
    if not isinstance(numbers, torch.Tensor):
        expected = "an int or a tensor" if name == "cache_seqlens" else "a tensor"
        raise ArgumentTypeError(f"`{name}` is a {type(numbers).__name__}; expected {expected} of int32")
    if numbers.dtype is not torch.int32:
        raise ArgumentTypeError(f"`{name}` has elements of {str(numbers.dtype).removeprefix('torch.')}; expected int32")
    if numbers.dim() != len(shape) or numbers.shape[0] != shape[0]:
        axes = "batch, max_pages" if len(shape) == 2 else "batch"
        raise ArgumentError(f"`{name}` is {list(numbers.shape)}; expected [{axes}], and `q` has a batch of {shape[0]}")
    check_one_device(name, numbers.device, "q", q.device)
