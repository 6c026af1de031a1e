"""Sequences of several lengths, packed one after another: flash-attention's functions of them, and torch's `varlen_attn`.

Tensors are [total, heads, size], read in place. `cu_seqlens` int32 [batch + 1] says where each sequence begins and the last one
ends, in the GPU's memory: the host never reads it, and knows a length that no sequence exceeds.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.torch.check_cache import descales_of
from attngen.torch.description import Mode
from attngen.torch.flash_attn import EVERYTHING, OF_DENSE, Returned, Window, attend, returned, unbound
from attngen.torch.flash_names import check_hints, check_others, one_of
from attngen.torch.layout import check_tensors
from attngen.torch.stored import Stored

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

OF_PACKED = (*OF_DENSE, "score_mod", "mask_mod", "seqlen_k_per_split")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    num_splits: int | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    mode: Mode = "auto",
    **others: object,
) -> Returned:
    """flash-attention's function of that name: `attngen.torch.flash_attn_func` of each sequence.

    q [total_q, q_heads, size], k and v [total_k, kv_heads, size]; sequence i has the rows from cu_seqlens_q[i] to
    cu_seqlens_q[i + 1] of q and the keys from cu_seqlens_k[i] on, none if two are equal. Rows past `max_seqlen_q` and keys past
    `max_seqlen_k` of a sequence are ignored. `alibi_slopes` is [q_heads] or [batch, q_heads]. With `block_table` int32 [batch,
    max_pages], k and v are [pages, page_size, kv_heads, size]: key j of sequence i is row j % page_size of page
    block_table[i, j / page_size], and there are cu_seqlens_k[i + 1] - cu_seqlens_k[i] of them, or seqused_k[i] (int32 [batch]).
    `q_descale`, `k_descale` and `v_descale` are those of `flash_attn_func`, for tensors of 8 bits.
    Without pages, `seqused_k` says how many of a sequence's keys are read: kernels then look up where each key lies, which is
    slower. With pages or `seqused_k`, a backward raises. `page_table` is `block_table` by the name of versions 3 and 4.
    `seqused_q` int32 [batch] says how many of a sequence's rows there are, from the first; then q and O are copied, and O of
    the other rows is 0. `sinks` and `attention_chunk`, the hints, and what is refused are those of `flash_attn_func`.

    Returns O [total_q, q_heads, size], with `return_lse` (O, lse [q_heads, total_q]), or with `return_attn_probs` (O, lse,
    empty tensor). Raises ArgumentError.
    """
    check_others("flash_attn_varlen_func", others, OF_PACKED)
    for name in ("score_mod", "mask_mod"):
        if others.get(name) is not None:
            cure = 'attngen.compile(spec, storage="packed") has a spec\'s score and mask'
            raise ArgumentError(f"`{name}` is not supported for packed sequences; {cure}")
    check_hints(num_splits, pack_gqa, sm_margin)
    sink, table = one_of(sinks=sinks, learnable_sink=learnable_sink), one_of(block_table=block_table, page_table=page_table)
    back = None
    if seqused_q is not None:
        q, cu_seqlens_q, back = _used_rows(q, cu_seqlens_q, seqused_q)
    k, v, lengths = _stored(k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, table, seqused_k)
    descales = descales_of(q, k, cu_seqlens_q.numel() - 1, k_descale=k_descale, v_descale=v_descale, q_descale=q_descale)
    named = {"mode": mode, "sinks": sink, "attention_chunk": attention_chunk, "descales": descales}
    output, lse = attend(q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                         return_attn_probs or return_lse, **named)  # fmt: skip
    if back is not None:
        at, is_used = back
        output = output[at].masked_fill(~is_used[:, None, None], 0)
        lse = None if lse is None else lse[:, at].masked_fill(~is_used, float("-inf"))
    return returned(q, output, lse, return_attn_probs, return_lse)


def _used_rows(q: Tensor, begins: Tensor, used: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(the rows of q that are used, one sequence after another; where these begin; for each row of q, which of them it is, and
    whether it is one). Nothing is read on the host, so that as many rows of zeros follow as are not used: kernels do not write
    their gradients, which are masked. Raises ArgumentError."""
    check_tensors(q=q, cu_seqlens_q=begins, seqused_q=used)
    batch = begins.numel() - 1
    if q.dim() != 3 or begins.dim() != 1 or used.shape != (batch,):
        raise ArgumentError(f"`seqused_q` is {list(used.shape)}; expected [batch], of which `cu_seqlens_q` has {batch}")
    used = torch.minimum(used.clamp(min=0), begins.diff())
    ends = used.cumsum(0)
    packed = torch.nn.functional.pad(ends, (1, 0)).to(begins.dtype)
    rows = torch.arange(q.shape[0], device=q.device)
    last = max(used.shape[0] - 1, 0)
    of_packed = torch.bucketize(rows, ends, right=True).clamp(max=last)
    of_rows = torch.bucketize(rows, begins[1:].contiguous(), right=True).clamp(max=last)
    most = max(q.shape[0] - 1, 0)
    source = (begins[of_packed] + rows - packed[of_packed]).clamp(0, most)
    place = rows - begins[of_rows]
    is_used = (place >= 0) & (place < used[of_rows])
    q = q[source].masked_fill((rows >= packed[-1])[:, None, None], 0)
    return q, packed, ((packed[of_rows] + place).clamp(0, most), is_used)


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
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: Window = EVERYTHING,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    mode: Mode = "auto",
) -> Tensor | tuple[Tensor, Tensor | None]:
    """torch.nn.attention.varlen's function of that name.

    The tensors are those of `flash_attn_varlen_func`, `block_table` and `seqused_k` too; a window of (-1, 0) is causal. Fewer
    key/value heads than query heads need `enable_gqa`. Keys are never split, whatever `num_splits` says.

    Returns O, or with an AuxRequest that wants lse (O, lse [q_heads, total_q]). Raises ArgumentError.
    """
    check_tensors(query=query, key=key, value=value)
    q_heads, kv_heads = query.shape[-2:-1], key.shape[-2:-1]
    if not enable_gqa and q_heads != kv_heads:
        raise ArgumentError(
            f"`query` is {list(query.shape)} and `key` {list(key.shape)}; pass enable_gqa=True to share heads of `key`"
        )
    if enable_gqa and kv_heads and (kv_heads[0] == 0 or q_heads[0] % kv_heads[0]):
        raise ArgumentError(f"`query` has {q_heads[0]} heads, which is no multiple of kv heads: `key` has {kv_heads[0]}")
    returns_lse = return_aux is not None and return_aux.lse
    key, value, lengths = _stored(key, value, cu_seq_q, cu_seq_k, max_q, max_k, block_table, seqused_k)
    output, lse = attend(query, key, value, lengths, 0.0, scale, False, window_size, 0.0, None, False, returns_lse, mode=mode)
    return (output, lse) if returns_lse else output


def varlen_attn_out(
    out: Tensor, *arguments: Any, return_aux: AuxRequest | None = None, **named: Any
) -> Tensor | tuple[Tensor, Tensor | None]:
    """torch.nn.attention.varlen's function of that name: `varlen_attn` into `out` [total_q, q_heads, size], by a copy of O. The
    other arguments are those of `varlen_attn`. It has no gradients.

    Returns `out`, or with an AuxRequest that wants lse (`out`, lse). Raises ArgumentError.
    """
    check_tensors(out=out)
    with torch.no_grad():
        found = varlen_attn(*arguments, return_aux=return_aux, **named)
        output = found[0] if isinstance(found, tuple) else found
        if (out.shape, out.dtype, out.device) != (output.shape, output.dtype, output.device):
            raise ArgumentError(
                f"`out` is {list(out.shape)} of {out.dtype} on {out.device}; "
                f"expected {list(output.shape)} of {output.dtype} on {output.device}"
            )
        out.copy_(output)
    return (out, found[1]) if isinstance(found, tuple) else out


def _longest(length: Any) -> Any:
    """The length of the longest sequence as an int, or as torch.compile's symbol of one. Raises ArgumentTypeError."""
    if isinstance(length, (int, torch.SymInt)):
        return length
    try:
        return index(length)  # also for a tensor: it waits for the GPU
    except (TypeError, RuntimeError):
        raise ArgumentTypeError(f"the length of the longest sequence is {length!r}; expected an int") from None


def _stored(
    k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, max_q: int, max_k: int, table: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor, Stored]:
    """k, v, and where sequences lie: one after another, or with a page `table`, their keys in pages. With `used` and no table,
    each key of the packed sequences is a page. Raises ArgumentError."""
    for name, one in (("q", cu_q), ("k", cu_k)):
        if not isinstance(one, torch.Tensor) and (one is not None or name == "q"):
            raise ArgumentTypeError(f"the beginnings of {name} are a {type(one).__name__}; expected a tensor int32 [batch + 1]")
    for name, one in (("block_table", table), ("seqused_k", used)):
        if one is not None and not isinstance(one, torch.Tensor):
            raise ArgumentTypeError(f"`{name}` is a {type(one).__name__}; expected a tensor of int32")
    max_q, max_k = _longest(max_q), _longest(max_k)
    if table is None and cu_k is None:
        raise ArgumentTypeError("the beginnings of the keys are None; without `block_table`, pass them as int32 [batch + 1]")
    if table is None:
        assert cu_k is not None
        if used is None:
            return k, v, Stored("packed", (cu_q, cu_k), (max_q, max_k))
        check_tensors(k=k, v=v)
        for name, rows in (("k", k), ("v", v)):
            if rows.dim() != 3:
                raise ArgumentError(f"`{name}` is {list(rows.shape)}; expected [total, heads, size]")
        places = torch.arange(max_k, dtype=cu_k.dtype, device=cu_k.device) + cu_k[:-1, None]
        k, v, table = k.unsqueeze(1), v.unsqueeze(1), places.clamp(0, max(k.shape[0] - 1, 0))
    elif used is None:
        if cu_k is None:
            raise ArgumentError("with `block_table`, pass the lengths of the keys as `seqused_k`, or their beginnings")
        used = cu_k.diff()
    assert used is not None
    return k, v, Stored("packed_paged", (cu_q, table, used), (max_q, max_k))
