"""`flex_attention`: torch's FlexAttention by attngen's kernels, forward and backward, of masks and scores as they are."""

from __future__ import annotations

import math
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.sdpa import plain_scale
from attngen.spec.dropout import RNG_STATE
from attngen.torch.block_mask import BlockMask, Function, tables_of
from attngen.torch.description import Mode, sources
from attngen.torch.dropout import generator_state, share_of
from attngen.torch.flex_operator import attend_untraced, flex_operator
from attngen.torch.layout import check_tensors, follow_autocast, no_tensor
from attngen.torch.private import ONE_BLOCK, check_input, check_sizes, eval_frame_callback, mask_of_slice, no_score, warn_once

TORCH_OPTIONS = frozenset(theirs.FlexKernelOptions.__annotations__) | {  # those that its kernels read beside
    "BLOCK_DMODEL", "FLOAT32_PRECISION", "PARTITION_SIZE", "SPLIT_KV", "num_buffers_warp_spec", "num_consumer_groups",
}  # fmt: skip


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: theirs.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0,
) -> Any:
    """softmax(score_mod(scale * q k^T) where block_mask allows) v, with the arguments of torch's flex_attention.

    query [batch, q_heads, q_len, E], key [batch, kv_heads, kv_len, E], value [batch, kv_heads, kv_len, Ev], of fp16, bf16 or
    fp32, on a GPU (or on the CPU, where the emulated device runs them, slowly). A key or value of another float type than the
    query's, fp8 too, is converted to that one first, as torch's kernel does element by element. Every tensor that requires grad
    has a gradient, those that `score_mod` captures too. Masks have none. torch's own `kernel_options` have no effect; "mode" is
    that of `attngen.torch.attention`: a schedule, or "math" for torch's operations, which compute fp64 too. `sinks` [q_heads],
    which torch's function lacks, are one more logit of each head's rows, without a value; `dropout_p` is the share of weights
    that are dropped, in 256ths, by torch's generator. lse includes the sinks, and dropout does not change it.

    Returns the output, with the strides that torch's has; with `return_aux` also an AuxOutput, of which lse is differentiable;
    with `return_lse` also lse. Raises ImportRefusal for a mask or score that cannot be an expression, which names the operator
    and its place, ArgumentError or ValueError for arguments. It computes all pairs by torch only if "mode" says so.
    """
    if return_lse and return_aux is not None:
        raise ValueError(
            "Cannot specify both return_lse and return_aux. return_lse is deprecated, please use "
            "return_aux=AuxRequest(lse=True) instead."
        )
    if return_lse and not torch.compiler.is_dynamo_compiling():
        advice = "return_lse is deprecated and will be removed in v2.10. Please use return_aux=AuxRequest(lse=True) instead."
        warn_once("deprecated_return_lse", advice, category=FutureWarning)
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise ArgumentTypeError(f"`return_aux` is a {type(return_aux).__name__}; expected an AuxRequest, as torch's function")
    _check(query, key, value, block_mask, enable_gqa)
    if sinks is not None:
        check_tensors(sinks=sinks)
    if isinstance(scale, torch.Tensor):
        raise ArgumentTypeError("`scale` is a tensor; expected a number. Multiply the score by a tensor in `score_mod`")
    wants = (return_lse or (return_aux is not None and return_aux.lse), return_aux is not None and return_aux.max_scores)
    q, k, v = _of_one_type(*follow_autocast(query, key, value))
    scale = 1.0 / math.sqrt(index(query.shape[3])) if scale is None else scale
    tables, mask_mod, block_size = _mask(block_mask, q, k)
    share = share_of(dropout_p)
    state = generator_state(query.device) if share else None
    mode = _mode(kernel_options)
    if torch.compiler.is_dynamo_compiling():
        lists = (tables.get("partial_blocks"), tables.get("full_blocks"))
        blocks = (block_size, *lists, sinks, state, theirs.noop_mask if mask_mod is None else mask_mod)
        score = no_score if score_mod is None else score_mod
        options = {"mode": mode, "wants": wants, "dropout": share, "sources": sources()}
        output, lse, largest = flex_operator(q, k, v, score, blocks, scale, options)
    else:
        others = {"sinks": sinks, RNG_STATE.name: state}
        tables = {**tables, **{n: tensor for n, tensor in others.items() if tensor is not None}}
        # Dynamo, if it has given this frame up, would trace the frames below
        run = attend_untraced if eval_frame_callback() in (None, False) else torch.compiler.disable(attend_untraced)
        call = (tables, block_size, plain_scale(scale), mode, wants, share)
        output, lse, largest = run(q, k, v, score_mod, mask_mod, call)
    if return_aux is not None:
        return output, AuxOutput(lse=lse if wants[0] else None, max_scores=largest if wants[1] else None)
    return (output, lse) if return_lse else output


def _of_one_type(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with k and v in q's type: torch's kernel converts each element that it reads, this copies all of them first. A
    gradient is in the type of its tensor. Raises ValueError for gradients in 8 bits."""
    for name, one in (("key", k), ("value", v)):
        if one.requires_grad and torch.is_grad_enabled() and one.dtype is not q.dtype and one.itemsize == 1:
            raise ValueError(
                "Backward pass with mixed query, key, and value dtype is not supported for types of 8 bits, "
                f"but `{name}` has {one.dtype}: detach it, or convert it to {q.dtype} first"
            )
    k, v = (t if t.dtype is q.dtype or not t.is_floating_point() else t.to(q.dtype) for t in (k, v))
    return q, k, v


def _mode(kernel_options: object) -> Mode:
    """The mode that `kernel_options` state, beside those of torch. Raises ArgumentError, ArgumentTypeError."""
    if kernel_options is None:
        return "auto"
    if not isinstance(kernel_options, dict):
        raise ArgumentTypeError(f"`kernel_options` is a {type(kernel_options).__name__}; expected a dict")
    for name in kernel_options:
        if name != "mode" and str(name).removeprefix("fwd_").removeprefix("bwd_") not in TORCH_OPTIONS:
            raise ArgumentError(f'`kernel_options` has {name!r}; expected "mode" or torch\'s, which have no effect')
    mode: Mode = kernel_options.get("mode", "auto")
    return mode


def _mask(
    block_mask: theirs.BlockMask | None, q: Tensor, k: Tensor
) -> tuple[dict[str, Tensor], Function | None, tuple[int, int] | None]:
    """(tables of the lists, the function, block sizes) of a mask. Raises ValueError, ArgumentError."""
    if block_mask is None:
        return {}, None, None
    if not isinstance(block_mask, theirs.BlockMask):
        raise ArgumentTypeError(f"`block_mask` is a {type(block_mask).__name__}; expected what create_block_mask returns")
    if getattr(block_mask, "mask_mod", None) is mask_of_slice:
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    size = (index(block_mask.BLOCK_SIZE[0]), index(block_mask.BLOCK_SIZE[1]))  # another size is another kernel
    mask_mod = None if block_mask.mask_mod is theirs.noop_mask else block_mask.mask_mod
    if size == (ONE_BLOCK,) * 2:
        return {}, mask_mod, None
    _check_lengths(block_mask, q.size(2), k.size(2))
    if isinstance(block_mask, BlockMask) and block_mask.is_function:
        return {}, mask_mod, None
    partial, full = tables_of(block_mask)
    tables = {"partial_blocks": partial} | ({} if full is None else {"full_blocks": full})
    for which, table in tables.items():
        if table.device != q.device:
            raise RuntimeError(f"Expect q/k/v and block_mask to be on the same device but got {q.device} and {table.device}.")
        for dim, wanted in ((0, q.size(0)), (1, q.size(1))):
            if table.size(dim) not in (1, wanted):
                raise ValueError(f"block_mask has {which} [{table.size(dim)}] in dimension {dim}; expected 1 or {wanted}")
        if not torch.compiler.is_dynamo_compiling() and table.size(2) * size[0] < q.size(2):
            rows = f"{table.size(2)} blocks of {size[0]} rows"
            raise ValueError(f"block_mask has {which} of {rows}; expected blocks of all {q.size(2)} rows of q")
    return tables, mask_mod, size


def _check_lengths(block_mask: theirs.BlockMask, q_len: int, kv_len: int) -> None:
    rows, keys = block_mask.seq_lengths
    # one after the other: of both at once, torch.compile forgets that a mask's two lengths are the same symbol
    if q_len == rows and kv_len == keys:
        return
    smaller = q_len > rows or kv_len > keys
    advice = (
        "As the block mask was created for a smaller length than you're using it for, you likely need to create a new block "
        "mask."
        if smaller
        else "As the block mask was created for a larger length than you're using it for, you can either 1. create a new block "
        "mask with the correct length, or 2. 'adjust' the existing block mask to the correct length by calling "
        "block_mask._adjust(q_len, kv_len)."
    )
    raise ValueError(
        f"block_mask was created for block_mask.shape={block_mask.shape} but got q_len={q_len} and kv_len={kv_len}. {advice}"
    )


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: object, enable_gqa: bool) -> None:
    """Raises as torch's flex_attention does."""
    for name, one in (("query", query), ("key", key), ("value", value)):
        if not isinstance(one, torch.Tensor):
            raise ArgumentTypeError(f"`{name}` is {no_tensor(one)}; expected a tensor")
    if any(t.is_nested for t in (query, key, value)):
        raise NotImplementedError("flex_attention does not support NestedTensor inputs; convert them to dense tensors")
    check_input(query, key, value, allow_lowp_kv=True)
    check_sizes(query, key, value)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    q_heads, kv_heads = query.size(-3), key.size(-3)
    if not enable_gqa and q_heads != kv_heads:
        raise ValueError(
            f"Expect query and key/value to have the same number of heads but got Hq={q_heads} and Hkv={kv_heads}. "
            "Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and (kv_heads == 0 or q_heads % kv_heads):
        raise ValueError(
            f"Expect number of query heads to be a multiple of kv heads for GQA but got Hq={q_heads} and Hkv={kv_heads}."
        )
    if query.size(0) != key.size(0) and (block_mask is None or key.size(0) != 1):
        raise ValueError(
            "Expect query and key/value to have the same batch size, or non-none block_mask, "
            f"but got block_mask={block_mask}, Bq={query.size(0)}, and Bkv={key.size(0)}."
        )
