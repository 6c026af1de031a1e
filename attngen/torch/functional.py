"""`attention`: torch's scaled_dot_product_attention by attngen's kernels."""

from __future__ import annotations

from typing import Any

from attngen.spec.attention import Rung
from attngen.torch.description import head_size, standard_text
from attngen.torch.eager import EagerCalls
from attngen.torch.layout import check_equal_heads, four_dimensions, heads_first

Tensor = Any


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    mode: Rung = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
    copy: bool = False,
) -> Any:
    """softmax(scale * q k^T + attn_mask) v.

    q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, head_dim_v], of
    fp16, bf16 or fp32, on a GPU (or on the CPU, where the emulated device runs them, slowly); with layout="bshd" [batch,
    length, heads, size]. Views are read in place; what a kernel cannot read so is an error, or copied with `copy`.

    `attn_mask` is boolean (true: take part) or a float tensor that is added, broadcastable to [batch, q_heads, q_len, kv_len].
    `is_causal` lets query i see keys up to i. `scale` is 1 / sqrt(head_dim) by default. Fewer key/value heads than query
    heads need `enable_gqa`. `mode` is naive, tiled, fused, wgmma, hopper or auto.

    Gives O, laid out as q, or with `return_lse` (O, lse [batch, q_heads, q_len] in fp32). Raises ArgumentError, which names the
    argument, and for inputs that require grad.
    """
    said = None if copy else (mode, is_causal, scale, enable_gqa, return_lse, layout)
    inputs = () if attn_mask is None else (attn_mask,)
    result = _calls.repeat(q, k, v, inputs, said)
    if result is None:
        queries, keys, values = heads_first(q, k, v, layout, copy)
        if not enable_gqa:
            check_equal_heads(queries, keys)
        mask_dtype = None if attn_mask is None else attn_mask.dtype
        text = standard_text(
            mode, is_causal, scale, return_lse, queries.dtype, head_size(queries), head_size(values), mask_dtype
        )
        lists = () if attn_mask is None else ([four_dimensions(attn_mask)],)
        result = _calls.make(q, k, v, inputs, said, (queries, keys, values, text, *lists))
    output, lse = result
    if layout == "bshd":
        output = output.transpose(1, 2)
    return (output, lse) if return_lse else output


_calls = EagerCalls()
