"""`attention`: torch's scaled_dot_product_attention by attngen's kernels."""

from __future__ import annotations

from typing import Any

from attngen.sdpa import refuse_dropout, refuse_renamed, register_of_tensors
from attngen.spec.attention import Rung
from attngen.torch.description import head_size, standard_text
from attngen.torch.eager import EagerCalls
from attngen.torch.layout import check_equal_heads, four_dimensions, heads_first, laid_out

Tensor = Any


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mode: Rung = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
    copy: bool = False,
    **unknown: Any,
) -> Any:
    """softmax(scale * q k^T + attn_mask) v, with the arguments of torch's scaled_dot_product_attention, in its order.

    query [batch, q_heads, q_len, head_dim], key [batch, kv_heads, kv_len, head_dim], value [batch, kv_heads, kv_len,
    head_dim_v], of fp16, bf16 or fp32, on a GPU (or on the CPU, where the emulated device runs them, slowly); with
    layout="bshd" [batch, length, heads, size]. Batch, or batch and heads, may be missing; key and value of batch 1 serve every
    batch. Views are read in place; what a kernel cannot read so is an error, or copied with `copy`.

    `attn_mask` is boolean (true: take part) or a float tensor that is added, broadcastable to [batch, q_heads, q_len, kv_len].
    `is_causal` lets query i see keys up to i. `scale` is 1 / sqrt(head_dim) by default. Fewer key/value heads than query
    heads need `enable_gqa`. `dropout_p` must be 0. `mode` is naive, tiled, fused, wgmma, hopper or auto.

    Gives O, laid out as the query, or with `return_lse` (O, lse [batch, q_heads, q_len] in fp32). Raises ArgumentError, which
    names the argument, and for inputs that require grad; TypeError for a keyword that is not torch's.
    """
    if unknown:
        refuse_renamed(unknown, attention)
    if dropout_p:
        refuse_dropout(dropout_p)
    said = None if copy else (mode, is_causal, scale, enable_gqa, return_lse, layout)
    inputs = () if attn_mask is None else (attn_mask,)
    result = _calls.repeat(query, key, value, inputs, said)
    if result is None:
        queries, keys, values = heads_first(query, key, value, layout, copy)
        if not enable_gqa:
            check_equal_heads(queries, keys)
        mask = None if attn_mask is None else four_dimensions(attn_mask)
        mask_dtype = None if mask is None else mask.dtype
        text = standard_text(
            mode, is_causal, scale, return_lse, queries.dtype, head_size(queries), head_size(values), mask_dtype
        )
        lists = () if mask is None else ([mask],)
        result = _calls.make(query, key, value, inputs, said, (queries, keys, values, text, *lists))
    output, lse = result
    if layout == "bshd" or query.dim() != 4:
        output, lse = laid_out(output, lse, query, layout)
    return (output, lse) if return_lse else output


_calls = EagerCalls()
register_of_tensors(attention)
