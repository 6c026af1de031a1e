"""Attention to a cache of keys and values: flash-attention's function of it.

Tensors are [batch, length, heads, size], read in place. The lengths of sequences are in the GPU's memory: the host never reads
them, so that a CUDA graph replays with other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngen.device.arrays import ArgumentError
from attngen.torch.description import Mode
from attngen.torch.flash_attn import EVERYTHING, Cached, attend

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
    `attngen.torch.flash_attn_func`: the last row stands at the last key of its sequence. The plan chooses how many blocks share
    the keys of a row, whatever `num_splits` says. `mode` is that of `attngen.torch.attention`.

    Returns O [batch, q_len, q_heads, size], or with `return_softmax_lse` (O, lse [batch, q_heads, q_len]). No gradients. A row
    without keys has O = 0 and lse = -inf. Raises ArgumentError.
    """
    for name, given in (
        ("k", k),
        ("rotary_cos", rotary_cos),
        ("cache_batch_idx", cache_batch_idx),
        ("block_table", block_table),
    ):
        if given is not None:
            raise ArgumentError(f"`{name}` was given, and is not supported yet")
    lengths = None
    if cache_seqlens is not None or cache_leftpad is not None:
        used = _lengths(k_cache.shape[1] if cache_seqlens is None else cache_seqlens, q)
        lengths = Cached((used,) if cache_leftpad is None else (used, cache_leftpad), 0)
    others = (0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
    found = attend(q, k_cache, v_cache, lengths, *others, mode=mode)
    return found[:2] if return_softmax_lse else found


def _lengths(cache_seqlens: int | Tensor, q: Tensor) -> Tensor:
    """`cache_seqlens` as a tensor [batch]."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
