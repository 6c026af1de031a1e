"""FlashAttention-4's functions by attngen's kernels: the arguments, their order and defaults of `flash_attn.cute`.

    from attngen.torch.flash_attn_4 import flash_attn_func  # in place of: from flash_attn.cute import flash_attn_func

Each is the function of the same name of `attngen.torch`, which says what arguments mean, which are hints, and which are
refused. Unlike these, they return (O, lse) always, and lse is None without `return_lse`. `score_mod` and `mask_mod` are
functions of tensors, as flex_attention's; those of CuTe are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.torch.flash_attn import Window
from attngen.torch.flash_attn import flash_attn_func as dense
from attngen.torch.flash_mods import Mod
from attngen.torch.varlen import flash_attn_varlen_func as packed


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None,
    aux_tensors: object = None,
    aux_scalars: object = None,
    block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None,
    return_lse: bool = False,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """(O [batch, q_len, q_heads, size], lse [batch, q_heads, q_len] or None). `named` are keywords of
    `attngen.torch.flash_attn_func`. Raises ArgumentError."""
    found: Any = dense(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=_window(window_size, causal), softcap=softcap,
        deterministic=deterministic, qv=qv, gather_kv_indices=gather_kv_indices, learnable_sink=learnable_sink,
        num_splits=num_splits, pack_gqa=pack_gqa, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors or None, aux_scalars=aux_scalars or None, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, return_lse=return_lse, **named,
    )  # fmt: skip
    return found if return_lse else (found, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None,
    block_sparse_tensors: object = None,
    aux_tensors: object = None,
    aux_scalars: object = None,
    return_lse: bool = False,
    scheduler_metadata: object = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """(O [total_q, q_heads, size], lse [q_heads, total_q] or None) of packed sequences. A length of the longest sequence that
    is not given is that of all. `named` are keywords of `attngen.torch.flash_attn_varlen_func`. Raises ArgumentError, also for
    sequences that are not packed."""
    if cu_seqlens_q is None:
        raise ArgumentError("`cu_seqlens_q` is None; for q of [batch, length, heads, size] call flash_attn_with_kvcache")
    longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    if max_seqlen_k is None:
        max_seqlen_k = k.shape[0] if page_table is None else page_table.shape[1] * k.shape[1]
    found: Any = packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=_window(window_size, causal), softcap=softcap, deterministic=deterministic, qv=qv,
        min_seqlen_k=min_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, gather_kv_indices=gather_kv_indices,
        page_table=page_table, learnable_sink=learnable_sink, num_splits=num_splits, pack_gqa=pack_gqa,
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors or None, aux_scalars=aux_scalars or None, return_lse=return_lse,
        scheduler_metadata=scheduler_metadata, seqlen_k_per_split=seqlen_k_per_split,
        disable_scheduler_metadata=disable_scheduler_metadata, **named,
    )  # fmt: skip
    return found if return_lse else (found, None)


def _window(window_size: Window, causal: bool) -> Window:
    """`window_size` as other versions have it. A negative number is an end on the other side of a position here; a window of
    both that would be empty is none. Raises ArgumentError for negative ends of others."""
    left, right = window_size
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        return None, None
    if any(end is not None and end < 0 for end in (left, right)):
        raise ArgumentError(f"`window_size` is {tuple(window_size)!r}; expected numbers from 0 on, or None for no limit")
    return left, right
