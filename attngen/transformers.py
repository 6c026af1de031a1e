"""attngen for models of Hugging Face's transformers, by one import.

    import attngen.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attngen")

The import registers "attngen" with both interfaces of transformers (5.0 or later): attention and masks. A mask stays a function
of positions (causal, sliding, chunked, packed, padded, blocks of an image), so no mask of all pairs is built. Soft-caps,
position biases, sinks and grouped heads are those of the model. Everything has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)

from attngen.device.arrays import ArgumentError
from attngen.torch import BlockMask, create_block_mask, flex_attention

NAME = "attngen"
Tensor = Any


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **_: Any,
) -> BlockMask:
    """The mask of a call, with the arguments of transformers' mask interface. It holds the function: nothing is evaluated.

    `attention_mask` is [batch, keys so far], true for tokens and false for padding. The offsets are the positions of the first
    query and the first key.
    """
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    moved = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    return create_block_mask(moved, batch_size, None, q_length, kv_length, device)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(output [batch, q_len, q_heads, head size], None), with the arguments of transformers' attention interface.

    query [batch, q_heads, q_len, head size], key and value [batch, kv_heads, kv_len, head size]. `attention_mask` is what
    `mask` gave, or a tensor [batch or 1, q_heads or 1, q_len, kv_len or more]: boolean, true takes part; or float, added.
    `position_bias` is added to the scores in the same way, after the soft-cap. `s_aux` [q_heads] has a sink's logit for each
    head. Without a mask, a module is causal if its attribute `is_causal` says so. `kernel_options={"mode": ...}` names a
    schedule. `dropout` is the share of weights that are dropped. Raises ArgumentError for the attention weights as an
    output, which no kernel has.
    """
    if options.get("output_attentions"):
        raise ArgumentError('no kernel has the attention weights as an output; use attn_implementation="eager" for them')
    block_mask, added = None, position_bias
    if isinstance(attention_mask, torch.Tensor):
        dense = attention_mask[..., : key.shape[-2]]
        if dense.dtype == torch.bool:
            block_mask = _of_pairs(dense, query, key)
        else:
            added = dense if added is None else added + dense
    elif attention_mask is not None:
        block_mask = attention_mask
    elif query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        block_mask = create_block_mask(causal_mask_function, None, None, query.shape[2], key.shape[2], query.device)
    if added is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        added = added[..., : key.shape[2]].expand(shape)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[b, h, q, k]

    changes = softcap is not None or added is not None
    output = flex_attention(
        query,
        key,
        value,
        score_mod if changes else None,
        block_mask,
        scaling,
        enable_gqa=True,
        kernel_options=options.get("kernel_options"),
        dropout_p=dropout,
        sinks=s_aux,
    )
    return output.transpose(1, 2).contiguous(), None


def _of_pairs(dense: Tensor, query: Tensor, key: Tensor) -> BlockMask:
    """A boolean mask of all pairs as a mask function."""
    dense = dense.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])

    def takes_part(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return dense[b, h, q, k]

    batch, heads, q_len, kv_len = dense.shape
    return create_block_mask(takes_part, batch, heads, q_len, kv_len, query.device)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
