"""flash-attention's function with a score or a mask that is a Python function: flex_attention with another layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from attngen.device.arrays import ArgumentError
from attngen.torch.block_mask import create_block_mask
from attngen.torch.description import Mode
from attngen.torch.flash_names import check_mod
from attngen.torch.flex import flex_attention
from attngen.torch.layout import check_tensors, heads_first

Mod = Callable[..., Tensor]


def modified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    allowed: Mod | None,
    softcap: float,
    scale: float | None,
    dropout_p: float,
    sinks: Tensor | None,
    mode: Mode,
) -> tuple[Tensor, Tensor]:
    """(O [batch, q_len, q_heads, size], lse [batch, q_heads, q_len]) of `flash_attn_func` with `score_mod` or `mask_mod`; the
    mask that flash-attention's own arguments say is `allowed`, a function (row, key). Raises ArgumentError."""
    check_tensors(q=q, k=k, v=v)
    if score_mod is not None:
        check_mod("score_mod", score_mod, "score, batch, head, q_idx, kv_idx")
        if softcap > 0.0:
            raise ArgumentError("`softcap` and `score_mod` cannot be given together; limit scores in `score_mod`")
    if mask_mod is not None:
        check_mod("mask_mod", mask_mod, "batch, head, q_idx, kv_idx")
        if allowed is not None:
            raise ArgumentError(
                "`mask_mod` and causal=True, `window_size` or `attention_chunk` cannot be given together; say all in `mask_mod`"
            )
    elif allowed is not None:

        def mask_mod(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return allowed(row, key)

    def softcapped(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    queries, keys, values = heads_first(q, k, v, "bshd")
    lengths = queries.shape[2], keys.shape[2]
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, *lengths, queries.device)
    output, aux = flex_attention(
        queries,
        keys,
        values,
        softcapped if softcap > 0.0 else score_mod,
        block_mask,
        scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options={"mode": mode},
        dropout_p=dropout_p,
        sinks=sinks,
    )
    return output.transpose(1, 2), aux.lse
