"""Attention to a cache of keys and values: flash-attention's function of it.

Tensors are [batch, length, heads, size], read in place. The lengths of sequences are in the GPU's memory: the host never reads
them, so that a CUDA graph replays with other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngen.device.arrays import ArgumentError
from attngen.torch.append import appended
from attngen.torch.description import Mode
from attngen.torch.flash_attn import EVERYTHING, Cached, Paged, attend

Tensor = Any


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = EVERYTHING,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    mode: Mode = "auto",
) -> Any:
    """flash-attention's function of that name.

    q [batch, q_len, q_heads, size], k_cache and v_cache [batch, cache_len, kv_heads, size]. Sequence i has the first
    cache_seqlens[i] keys of its cache (an int, or int32 [batch]; all of them by default), from cache_leftpad[i] on (int32
    [batch]). `softmax_scale`, `causal`, `window_size`, `softcap` and `alibi_slopes` are those of
    `attngen.torch.flash_attn_func`: the last row stands at the last key of its sequence.

    k and v [batch, new_len, kv_heads, size] are first written to the cache, in place, after the keys that are there; what does
    not fit is left out. With `rotary_cos` and `rotary_sin`, [positions, rotary_dim / 2], k is rotated on the way, and q too: at
    the positions of the new rows, or at the first of them if the attention is neither causal nor in a window. rotary_dim is a
    multiple of 16. A pair is two neighbours if `rotary_interleaved`, else an element and the one rotary_dim / 2 further.

    Sequence i lies in cache i, or in cache cache_batch_idx[i] (int32 [batch]). With `block_table` int32 [batch, max_pages] the
    caches are [pages, page_size, kv_heads, size], and key n of sequence i is in page block_table[i, n // page_size].

    The plan chooses how many blocks share the keys of a row, whatever `num_splits` says. `mode` is that of
    `attngen.torch.attention`.

    Returns O [batch, q_len, q_heads, size], or with `return_softmax_lse` (O, lse [batch, q_heads, q_len]). No gradients. A row
    without keys has O = 0 and lse = -inf. Raises ArgumentError.
    """
    if block_table is not None and cache_batch_idx is not None:
        raise ArgumentError(
            "`block_table` and `cache_batch_idx` were both given; pass one: a page table already says where a sequence is"
        )
    pages = block_table if cache_batch_idx is None else cache_batch_idx.unsqueeze(1)  # a cache is one page
    with torch.no_grad():
        if pages is None and k_cache.shape[0] > q.shape[0]:
            k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
        longest = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
        used = _lengths(longest if cache_seqlens is None else cache_seqlens, q)
        if k is not None or v is not None or rotary_cos is not None:
            if k is None or v is None or cache_seqlens is None:
                raise ArgumentError(
                    "appending needs `k`, `v` and `cache_seqlens`, the length before it; at least one of them is missing"
                )
            if (rotary_cos is None) != (rotary_sin is None):
                raise ArgumentError("`rotary_cos` and `rotary_sin` need each other; pass both or neither")
            is_local = causal or tuple(window_size) != EVERYTHING
            tables = None if rotary_cos is None else (rotary_cos, rotary_sin)
            used, q = appended(
                q, k, v, k_cache, v_cache, used, pages, tables, interleaved=rotary_interleaved, by_position=is_local
            )
        lengths: Cached | Paged | None = Cached((used,) if cache_leftpad is None else (used, cache_leftpad))
        if pages is not None and mode == "math":
            k_cache, v_cache = (pool[pages.long().clamp(0, pool.shape[0] - 1)].flatten(1, 2) for pool in (k_cache, v_cache))
        elif pages is not None:
            lengths = Paged((pages, used), (longest,), cache_leftpad)
        elif cache_seqlens is None and cache_leftpad is None:
            lengths = None
        others = (0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
        found = attend(q, k_cache, v_cache, lengths, *others, mode=mode)
    return found[:2] if return_softmax_lse else found


def _lengths(cache_seqlens: int | Tensor, q: Tensor) -> Tensor:
    """`cache_seqlens` as a tensor [batch]."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
