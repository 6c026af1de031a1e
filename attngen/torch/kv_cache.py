"""Attention to a cache of keys and values: flash-attention's function of it.

Tensors are [batch, length, heads, size], read in place. The lengths of sequences are in the GPU's memory: the host never reads
them, so that a CUDA graph replays with other lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.torch.append import Turn
from attngen.torch.cached import Cache, Reader, attended
from attngen.torch.check_cache import Place, by_row, scales_of
from attngen.torch.description import Mode
from attngen.torch.flash_attn import EVERYTHING, Returned, Window, attend, front, limits
from attngen.torch.flash_names import check_hints, check_others, one_of
from attngen.torch.layout import check_tensors

OF_CACHE = ("q_descale", "qv", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens")


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
    window_size: Window = EVERYTHING,
    softcap: float = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    sinks: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    mode: Mode = "auto",
    **others: object,
) -> Returned:
    """flash-attention's function of that name.

    q [batch, q_len, q_heads, size], k_cache and v_cache [batch, cache_len, kv_heads, size]. Sequence i has the first
    cache_seqlens[i] keys of its cache (an int, or int32 [batch]; all of them by default, and if the number is larger), from
    cache_leftpad[i] on (int32 [batch]). `softmax_scale`, `causal`, `window_size`, `softcap` and `alibi_slopes` are those of
    `attngen.torch.flash_attn_func`: the last row stands at the last key of its sequence.

    k and v [batch, new_len, kv_heads, size] are first written to the cache, in place, after the keys that are there; what does
    not fit is left out. Two sequences must not write to the same row. With `rotary_cos` and `rotary_sin`, [positions,
    rotary_dim / 2], k is rotated on the way, and q too: at the positions of the new rows, or at the first of them if the
    attention is neither causal nor in a window. rotary_dim is a multiple of 16. A pair is two neighbours if
    `rotary_interleaved`, else an element and the one rotary_dim / 2 further.

    Sequence i lies in cache i, or in cache cache_batch_idx[i] (int32 [batch]). With `block_table` int32 [batch, max_pages] the
    caches are [pages, page_size, kv_heads, size], and key n of sequence i is in page block_table[i, n // page_size]. Those two
    stay on the device: that a cache or a page of a sequence exists is not checked. Rows after the last key of a sequence may
    hold anything, NaN too; those before cache_leftpad must hold numbers, such as zeros.

    Under autocast q, k and v are appended in the cache's element type; a cache of another type than autocast's is copied.
    Caches of torch's float8_e4m3fn or float8_e5m2 go with q, k and v of 16 or 32 bits: their numbers are multiplied with
    `k_descale` and `v_descale`, fp32 [batch, kv_heads], or numbers. New rows are divided by them and rounded to nearest, ties
    to even; what is beyond the largest number of the type becomes that number, and NaN stays NaN.

    A head size that is no multiple of 8 is supported by copies of the cache: such a cache is slow.

    `page_table` is `block_table` by version 3's name. `sinks` and `attention_chunk`, the hints, and what is refused are those
    of `attngen.torch.flash_attn_func`: the plan chooses how many blocks share the keys of a row, whatever `num_splits` says.
    `mode` is that of `attngen.torch.attention`.

    Returns O [batch, q_len, q_heads, size], or with `return_softmax_lse` (O, lse [batch, q_heads, q_len]). No gradients. A row
    without keys has O = 0 and lse = -inf. Raises ArgumentError.
    """
    check_others("flash_attn_with_kvcache", others, OF_CACHE)
    check_hints(num_splits, pack_gqa, sm_margin)
    sink = one_of(sinks=sinks, learnable_sink=learnable_sink)
    block_table = one_of(block_table=block_table, page_table=page_table)
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if k is not None or v is not None:
        check_tensors(**{name: one for name, one in (("k", k), ("v", v)) if one is not None})
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError("`rotary_cos` and `rotary_sin` need each other; pass both or neither")
    if rotary_cos is not None and k is None:
        raise ArgumentError("`rotary_cos` rotates rows that are appended; pass `k`, `v` and `cache_seqlens` too")
    turn = None
    if rotary_cos is not None and rotary_sin is not None:
        is_local = causal or bool(attention_chunk) or limits(window_size, causal) != EVERYTHING
        turn = Turn((rotary_cos, rotary_sin), rotary_interleaved, "new rows" if is_local else "first new row")
    with torch.no_grad():
        place = Place(cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
        arguments = (0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
        scales = scales_of(q, k_cache, 1, k_descale=by_row(k_descale), v_descale=by_row(v_descale))
        descales = [None if one is None else one.squeeze(1) for one in scales]
        named = {"mode": mode, "sinks": sink, "attention_chunk": attention_chunk, "descales": (*descales, None)}

        def attention(cache: Cache, only_checks: bool = False) -> object:
            rows, keys, values, lengths = cache
            return attend(rows, keys, values, lengths, *arguments, **named, only_checks=only_checks)

        inputs = [one for one in (alibi_slopes, sink, *descales) if one is not None]
        key: object = None
        if k is not None:
            given = (mode, softmax_scale, causal, limits(window_size, causal), softcap, return_softmax_lse)
            key = (*given, attention_chunk, alibi_slopes is None, sink is None)
        reader = Reader(attention, front, inputs, key)
        output, lse = attended(q, k_cache, v_cache, (k, v), turn, place, reader, mode == "math", scales=scales)
    return (output, lse) if return_softmax_lse else output
