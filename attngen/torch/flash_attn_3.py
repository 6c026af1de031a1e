"""FlashAttention-3's functions by attngen's kernels: the arguments, their order and defaults of `flash_attn_interface`.

    from attngen.torch.flash_attn_3 import flash_attn_func  # in place of: from flash_attn_interface import flash_attn_func

Each is the function of the same name of `attngen.torch`, which says what arguments mean, which are hints, and which are
refused. Unlike these, they return (O, lse) with `return_attn_probs`, and have no dropout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.torch.flash_attn import EVERYTHING, Returned, Window, unbound
from attngen.torch.flash_attn import flash_attn_func as dense
from attngen.torch.kv_cache import flash_attn_with_kvcache as cached
from attngen.torch.varlen import flash_attn_varlen_func as packed


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **named: Any,
) -> Returned:
    """O [batch, q_len, q_heads, size], or with `return_attn_probs` (O, lse [batch, q_heads, q_len]). `named` are keywords of
    `attngen.torch.flash_attn_func`. Raises ArgumentError."""
    return dense(
        q, k, v, softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        num_splits=num_splits, pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin,
        **{"return_lse": return_attn_probs, **named},
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **named: Any,
) -> Returned:
    """`flash_attn_func` of qkv [batch, length, 3, heads, size]. Raises ArgumentError, also for `num_heads_q`, which says that
    query heads and key heads lie in one dimension, [batch, length, heads of all, size]."""
    if num_heads_q is not None:
        raise ArgumentError("`num_heads_q` is not supported; split `qkv` into q, k and v, and call flash_attn_func")
    q, k, v = unbound(qkv, "qkv", 3, "batch, length")
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs, **named,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **named: Any,
) -> Returned:
    """O [total_q, q_heads, size], or with `return_attn_probs` (O, lse [q_heads, total_q]). `named` are keywords of
    `attngen.torch.flash_attn_varlen_func`. Raises ArgumentError."""
    return packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
        softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        window_size=window_size, attention_chunk=attention_chunk, softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa,
        deterministic=deterministic, sm_margin=sm_margin, **{"return_lse": return_attn_probs, **named},
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: object = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **named: Any,
) -> Returned:
    """O [batch, q_len, q_heads, size], or with `return_softmax_lse` (O, lse [batch, q_heads, q_len]). `named` are keywords of
    `attngen.torch.flash_attn_with_kvcache`. Raises ArgumentError."""
    return cached(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        page_table=page_table, qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        attention_chunk=attention_chunk, softcap=softcap, rotary_interleaved=rotary_interleaved,
        scheduler_metadata=scheduler_metadata, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
        return_softmax_lse=return_softmax_lse, **named,
    )  # fmt: skip
