"""attngen among torch's implementations of flash attention: `torch.nn.attention.activate_flash_attention_impl("attngen")`.

torch (2.11 or later) lets a library replace the operators behind its flash backend: those of scaled_dot_product_attention, of
`varlen_attn` and of context parallelism. The functions here have the signatures of these operators. lse is the natural
logarithm, fp32. `is_causal` and windows are aligned to the last row and the last key. With dropout, `rng_state` holds seed and
offset, which the backward reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as implementations

from attngen.device.arrays import ArgumentError
from attngen.spec.attention import Storage
from attngen.torch import backward
from attngen.torch.copies import in_place
from attngen.torch.description import scale_of
from attngen.torch.dropout import generator_state, share_of
from attngen.torch.flash_attn import ends, flash_text, limits, rank
from attngen.torch.private import remove
from attngen.torch.runtime import runtime

Gradients = tuple[Tensor, Tensor, Tensor]
NAMES = {"attngen": ("CUDA",), "attngen emulated": ("CUDA", "CPU")}  # and the dispatch keys of the devices that each serves
EXISTS = hasattr(implementations, "restore_flash_attention_impl")


class Handle:
    """The operators on devices with a dispatch key of `keys`, until `remove`."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for operator, function in OPERATORS.items():
                for key in keys:
                    self._library.impl(operator, function, key)

    def remove(self) -> None:
        """The operators are again what they were."""
        remove(self._library)


def current() -> str | None:
    """The name of torch's present implementation; None for torch's own."""
    return implementations.current_flash_attention_impl() if EXISTS else None


def activate(name: str | None) -> None:
    """Makes `name` torch's implementation in place of the present one; None: torch's own. Nothing if it is already."""
    if name == current():
        return
    if name is None:
        implementations.restore_flash_attention_impl()
    else:
        implementations.activate_flash_attention_impl(name)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    **unsupported: object,
) -> tuple[Tensor, ...]:
    """`_flash_attention_forward`: (O, lse, rng_state, unused, debug mask without elements).

    query [batch, q_len, q_heads, size], key and value [batch, kv_len, kv_heads, size]; or packed, [total, heads, size], with
    `cum_seq_q` and `cum_seq_k`. lse is [batch, q_heads, q_len] or [q_heads, total]. O is written to `out` if there is one.
    Raises ArgumentError.
    """
    if return_debug_mask:
        raise ArgumentError("no kernel has the weights as an output: return_debug_mask must be False")
    for name, given in unsupported.items():
        if given is not None:
            raise ArgumentError(f"`{name}` was given; attngen's flash attention does not support it")
    q, k, v = (in_place(t) for t in (query, key, value))
    if alibi_slopes is not None and torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise ArgumentError("torch's backward of flash attention has no `alibi_slopes`; call attngen.torch.flash_attn_func")
    share = share_of(dropout_p)
    state = generator_state(query.device) if share else None
    lengths = None if cum_seq_q is None else (cum_seq_q, cum_seq_k, max_q, max_k)
    window = (window_size_left, window_size_right)
    text, inputs, ints, floats = _described(q, v, lengths, share, state, is_causal, scale, window, alibi_slopes, lse=True)
    if out is None and query.shape[-1] == value.shape[-1]:
        out = torch.empty_like(query)  # the strides that torch.compile expects
    packed = lengths is not None
    if not packed:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    written = () if out is None else (out if packed else out.transpose(1, 2), None)
    output, lse = runtime(text, q.device)((q, k, v, *inputs), ints, floats, written)
    rng_state = query.new_empty(2, dtype=torch.uint64) if state is None else state.view(torch.uint64)
    unused = query.new_empty((), dtype=torch.uint64)
    return output if packed else output.transpose(1, 2), lse, rng_state, unused, query.new_empty(0)


def flash_forward_inplace(out: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """`_flash_attention_forward_no_dropout_inplace`: lse; O is written to `out`."""
    lse: Tensor = flash_forward(*arguments, **named, out=out)[1]
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    """`_flash_attention_backward`: the gradients of query, key and value, from the forward's results.

    `out` and `logsumexp` may be those of more keys than `key` has: each block of a ring's keys gets its part of the gradients.
    """
    share = share_of(dropout_p)
    state = rng_state.view(torch.int64) if share else None
    q, k, v, o, do = (in_place(t) for t in (query, key, value, out, grad_out))
    lengths = None if cum_seq_q is None else (cum_seq_q, cum_seq_k, max_q, max_k)
    window = (window_size_left, window_size_right)
    text, inputs, ints, floats = _described(q, v, lengths, share, state, is_causal, scale, window, None, lse=False)
    if lengths is None:
        q, k, v, o, do = (t.transpose(1, 2) for t in (q, k, v, o, do))
    deterministic = backward.is_deterministic(None)
    saved = backward.saved_by(text, q.device, WANTED, deterministic)
    if "lse" not in saved:
        raise ArgumentError("the planned backward computes lse itself and cannot use the `logsumexp` of torch's operator")
    lse = logsumexp.contiguous()
    rest = torch.zeros_like(lse) if "lse_rest" in saved else None
    gradients = backward.run(do, None, q, k, v, text, inputs, ints, floats, o, lse, rest, WANTED, deterministic)
    dq, dk, dv = gradients if lengths is not None else (t.transpose(1, 2) for t in gradients)
    return dq, dk, dv


WANTED = ("q", "k", "v")


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    """`_scaled_dot_product_flash_attention` of [batch, heads, length, size]: (O, lse [batch, heads, q_len], None, None, q_len,
    kv_len, rng_state, unused, debug mask)."""
    q_len, kv_len = query.shape[2], key.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    rest = (None, None, q_len, kv_len, dropout_p, is_causal, return_debug_mask)
    out, lse, *others = flash_forward(q, k, v, *rest, scale=scale)
    return out.transpose(1, 2), lse, None, None, q_len, kv_len, *others


def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *arguments: Any, scale: float | None = None
) -> Gradients:
    """`_scaled_dot_product_flash_attention_backward`: the gradients of query, key and value."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    dq, dk, dv = (t.transpose(1, 2) for t in flash_backward(dout, q, k, v, o, *arguments, scale=scale))
    return dq, dk, dv


def _described(
    q: Tensor,
    v: Tensor,
    lengths: Sequence[Any] | None,
    dropout_p: float,
    state: Tensor | None,
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None],
    slopes: Tensor | None,
    *,
    lse: bool,
) -> tuple[str, list[Tensor], list[int], list[float]]:
    """The spec's text, its inputs, its ints and its floats."""
    left, right = limits([-1 if end is None else end for end in window], causal)
    begins, longest = ([], []) if lengths is None else (lengths[:2], lengths[2:])
    storage: Storage = "dense" if lengths is None else "packed"
    written, floats = scale_of(scale)
    text = flash_text(
        "auto", storage, causal, ends(left, right), 0.0, rank(slopes, q, begins), written, lse, q.dtype, q.shape[-1],
        v.shape[-1], dropout_p,
    )  # fmt: skip
    inputs = [t for t in (*begins, slopes, state) if t is not None]
    return text, inputs, [int(n) for n in (*longest, left, right) if n >= 0], floats


OPERATORS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
}
OPERATORS = {name: function for name, function in OPERATORS.items() if hasattr(torch.ops.aten, name)}
if EXISTS:
    for _name, _keys in NAMES.items():
        implementations.register_flash_attention_impl(_name, register_fn=partial(Handle, _keys))
