"""`attention`: torch's scaled_dot_product_attention by attngen's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.sdpa import ALL_AXES, check_equal_heads, check_flags, refuse_renamed, register_tensor_function
from attngen.torch.description import Mode, head_size, scale_of, standard_text
from attngen.torch.dropout import generator_state, share_of
from attngen.torch.front import Call, Front
from attngen.torch.layout import (
    follow_autocast,
    four_dimensions,
    heads_first,
    plain_mask,
    results,
    without_broadcasts,
)

How = tuple[Mode, bool, float | None, bool, bool, str, float]  # arguments of `attention` beside tensors


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mode: Mode = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
    copy: bool = False,
    deterministic: bool | None = None,
    seed: int | None = None,
    offset: int = 0,
    **unknown: object,
) -> Any:
    """softmax(scale * q k^T + attn_mask) v, with the arguments of torch's scaled_dot_product_attention, in its order.

    query [batch, q_heads, q_len, head_dim], key [batch, kv_heads, kv_len, head_dim], value [batch, kv_heads, kv_len,
    head_dim_v], of fp16, bf16 or fp32, on a GPU (or on the CPU, where the emulated device runs them, slowly); with
    layout="bshd" [batch, length, heads, size]. The dimensions batch, or batch and heads, may be missing; key and value
    of batch 1 are used for every batch. Views are read in place. A tensor that a kernel cannot read in place is an error, or is
    copied with `copy=True`. Tensors of a head size that is no multiple of 8 are copied and padded with zeros, as torch's flash
    attention does.

    `attn_mask` is boolean (True keeps the pair) or a float tensor that is added, broadcastable to [batch, q_heads, q_len,
    kv_len]. `is_causal` lets query i see keys up to i. `scale` is 1 / sqrt(head_dim) by default. Fewer key/value heads than
    query heads need `enable_gqa`. `mode` selects the schedule: naive, tiled, fused, wgmma, hopper, decode or auto. With
    mode="math" torch's own operations compute the result: in fp64 too, on any device, differentiable any number of times.

    `dropout_p` is the share of weights that are dropped, rounded to a multiple of 1/256; in evaluation too, as in torch's
    function. torch's generator of the device selects the weights; or `seed` and `offset` do, integers of 64 bits. The backward
    and the second forward of an activation checkpoint drop the same weights.

    O and lse have derivatives with respect to every tensor that requires grad, a float mask included; only mode="math" has
    second derivatives. With `deterministic`, gradients have the same bits in every run; without, faster kernels may add them in
    any order. The default is the setting of torch.use_deterministic_algorithms. Under autocast, query, key and value follow it.

    Returns O, laid out as the query, or with `return_lse` (O, lse [batch, q_heads, q_len] in fp32). Raises ArgumentError, which
    names the argument; TypeError for a keyword that is not torch's.
    """
    if unknown:
        refuse_renamed(unknown, attention)
    if attn_mask is not None:
        attn_mask, is_causal = plain_mask(attn_mask, is_causal, query)
    dropout_p = share_of(dropout_p)
    how = (mode, is_causal, scale, enable_gqa, return_lse, layout, dropout_p)
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if seed is None and offset:
        raise ArgumentError("`offset` was given without `seed`: both together replace torch's generator")
    if dropout_p:
        tensors = (*tensors, generator_state(query.device, *(() if seed is None else (seed, offset))))
    outputs = _front.call(tensors, how, _described, tensors, how, copy, deterministic)
    return results(outputs, query, layout, return_lse)


def _described(tensors: Sequence[Tensor], how: How, copy: bool, deterministic: bool | None) -> Call:
    """The operator's call. `tensors` are query, key, value, a mask if there is one, and with dropout the generator's state."""
    mode, is_causal, scale, enable_gqa, return_lse, layout, dropout_p = how
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse, copy=copy)
    if deterministic is not None:
        check_flags(deterministic=deterministic)
    q, k, v = follow_autocast(*heads_first(tensors[0], tensors[1], tensors[2], layout))
    inputs = list(tensors[3:])
    if not enable_gqa:
        check_equal_heads(q, k)
    sizes = head_size(q), head_size(v)
    axes, mask_dtype = ALL_AXES, None
    if len(inputs) > bool(dropout_p):
        inputs[0], axes = without_broadcasts(four_dimensions(inputs[0]), k.shape[2])
        mask_dtype = inputs[0].dtype
    written, floats = scale_of(scale)
    text = standard_text(mode, is_causal, written, return_lse, q.dtype, *sizes, mask_dtype, dropout_p, axes)
    lists: tuple[object, ...] = (inputs or None, None, floats) if floats else (inputs,) if inputs else ()
    return Call((q, k, v, text, *lists), mode, deterministic, copy).padded()


_front = Front()
register_tensor_function(attention)
