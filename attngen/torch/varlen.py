"""Sequences of several lengths, packed one after another: flash-attention's functions of them, and torch's `varlen_attn`.

Tensors are [total, heads, size], read in place. `cu_seqlens` int32 [batch + 1] says where each sequence begins and the last one
ends, in the GPU's memory: the host never reads it, and knows a length that no sequence exceeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attngen.device.arrays import ArgumentError
from attngen.torch.description import Mode
from attngen.torch.flash_attn import EVERYTHING, Packed, attend, unbound

Tensor = Any


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    mode: Mode = "auto",
) -> Any:
    """flash-attention's function of that name: `attngen.torch.flash_attn_func` of each sequence.

    q [total_q, q_heads, size], k and v [total_k, kv_heads, size]; sequence i has the rows from cu_seqlens_q[i] to
    cu_seqlens_q[i + 1] of q and the keys from cu_seqlens_k[i] on, none if two are equal. Rows past `max_seqlen_q` and keys past
    `max_seqlen_k` of a sequence are ignored. `alibi_slopes` is [q_heads] or [batch, q_heads]. `block_table` must be None.

    Returns O [total_q, q_heads, size], or with `return_attn_probs` (O, lse [q_heads, total_q], empty tensor). Raises
    ArgumentError.
    """
    if block_table is not None:
        raise ArgumentError(NO_PAGES.format(name="block_table"))
    lengths = Packed((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    others = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return attend(q, k, v, lengths, *others, mode=mode)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **named: Any) -> Any:
    """`flash_attn_varlen_func` of qkv [total, 3, heads, size]; the other arguments are the same."""
    q, k, v = unbound(qkv, "qkv", 3, "total")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **named)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Any:
    """`flash_attn_varlen_func` of q and kv [total_k, 2, kv_heads, size]; the other arguments are the same."""
    k, v = unbound(kv, "kv", 2, "total")
    return flash_attn_varlen_func(q, k, v, *arguments, **named)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: Sequence[int] = EVERYTHING,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    mode: Mode = "auto",
) -> Any:
    """torch.nn.attention.varlen's function of that name.

    The tensors are those of `flash_attn_varlen_func`; a window of (-1, 0) is causal. Fewer key/value heads than query heads
    need `enable_gqa`. `seqused_k` and `block_table` must be None; keys are never split, whatever `num_splits` says.

    Returns O, or with an AuxRequest that wants lse (O, lse [q_heads, total_q]). Raises ArgumentError.
    """
    for name, given in (("seqused_k", seqused_k), ("block_table", block_table)):
        if given is not None:
            raise ArgumentError(NO_PAGES.format(name=name))
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ArgumentError(f"`query` has {query.shape[1]} heads and `key` {key.shape[1]}; pass enable_gqa=True to share them")
    returns_lse = return_aux is not None and return_aux.lse
    lengths = Packed((cu_seq_q, cu_seq_k), (max_q, max_k))
    found = attend(query, key, value, lengths, 0.0, scale, False, window_size, 0.0, None, False, returns_lse, mode=mode)
    return found[:2] if returns_lse else found


NO_PAGES = "`{name}` was given, and no kernel reads a cache of pages; pass keys and values of all sequences one after another"
