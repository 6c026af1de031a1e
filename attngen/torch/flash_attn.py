"""flash-attention's functions by attngen's kernels: the same arguments, layouts and meanings.

    from attngen.torch import flash_attn_func  # in place of: from flash_attn import flash_attn_func

Tensors are [batch, length, heads, size], read in place. A query at row i stands at position i + kv_len - q_len among the keys,
so that `causal` and `window_size` are aligned to the last row and the last key.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.sdpa import check_flags
from attngen.spec.attention import Storage
from attngen.spec.cached import of_cache
from attngen.spec.expr import MAX_LENGTH
from attngen.torch.check_cache import descales_of
from attngen.torch.description import (
    Description,
    Mode,
    check_mode,
    constant,
    dtype_name,
    one_line,
    plain_number,
    scale_of,
    stored_types,
)
from attngen.torch.dropout import generator_state, share_of
from attngen.torch.flash_mods import Mod, modified
from attngen.torch.flash_names import check_hints, check_others, one_of
from attngen.torch.front import Call, Front
from attngen.torch.layout import check_tensors, follow_autocast, heads_first, needs_padding, padded, padded_heads, results
from attngen.torch.stored import DENSE, Stored

EVERYTHING = (-1, -1)  # a window without ends
Window = Sequence[int | None]
Returned = Tensor | tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]  # O, (O, lse), or (O, lse, empty)
How = tuple[
    Mode, float, float | None, bool, int, int, float, bool, Storage, tuple[str, ...], tuple[int, ...], bool, int,
    tuple[bool, ...],
]  # fmt: skip
INTS = (int, np.integer)
NUMBERS = (*INTS, float, np.floating)
OF_DENSE = (
    "qv", "gather_kv_indices", "score_mod_bwd", "aux_tensors", "aux_scalars", "block_sparse_tensors",
    "block_sparse_tensors_bwd",
)  # fmt: skip
CURES = {  # what to do instead of giving it beside a `score_mod`
    "alibi_slopes": "say it in `score_mod`",
    "deterministic": "call torch.use_deterministic_algorithms(True)",
}
WITHIN = {"left": "{position} - k <= left", "right": "k - ({position}) <= right"}  # a window's ends


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    num_splits: int | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    mode: Mode = "auto",
    **others: object,
) -> Returned:
    """flash-attention's function of that name: the order of arguments is version 2's, and those that only versions 3 and 4 have
    are keywords. `attngen.torch.flash_attn_3` and `attngen.torch.flash_attn_4` have the functions in the order of these.

    q [batch, q_len, q_heads, size], k and v [batch, kv_len, kv_heads, size]; q_heads is a multiple of kv_heads. `causal`: a
    query sees keys up to its position; the last row stands at the last key. `window_size` (left, right): it sees at most `left`
    keys before its position and `right` after it; a negative number, or None, is no limit. `attention_chunk` above 0 divides
    positions into chunks of so many, each of which sees its own keys. `softcap` above 0 limits the magnitude of
    scores; then the distance times `alibi_slopes` (fp32, [q_heads] or [batch, q_heads]) is subtracted. `dropout_p` is the share
    of weights that are dropped; torch's generator selects them. Gradients have the same bits in every run if `deterministic`,
    or after torch.use_deterministic_algorithms(True). `mode` is that of `attngen.torch.attention`.

    k and v of torch's float8_e4m3fn or float8_e5m2 go with q of 16 bits, or of 8, whose O is bf16: their numbers are multiplied
    with `q_descale`, `k_descale` and `v_descale`, fp32 [batch, kv_heads], or numbers. They have no gradients.

    `sinks`, or `learnable_sink`, [q_heads] are one more logit of each head's rows, without a value. `score_mod` (score, batch,
    head, q_idx, kv_idx) and `mask_mod` (batch, head, q_idx, kv_idx) are functions as flex_attention's: the indices count rows
    and keys from 0, and `mask_mod` says all that is masked. `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` are
    hints without effect: attngen plans them. Arguments of versions 3 and 4 that are not supported are refused, if they are
    not None.

    Returns O [batch, q_len, q_heads, size], with `return_lse` (O, lse [batch, q_heads, q_len]), or with `return_attn_probs`
    (O, lse, empty tensor): no kernel returns probabilities. A row without keys has O = 0 and lse = -inf. Raises ArgumentError.
    """
    check_others("flash_attn_func", others, OF_DENSE)
    check_hints(num_splits, pack_gqa, sm_margin)
    sink = one_of(sinks=sinks, learnable_sink=learnable_sink)
    if score_mod is not None or mask_mod is not None:
        beside = {"alibi_slopes": alibi_slopes, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        given = [name for name, value in beside.items() if value is not None]
        if given or deterministic:
            name = given[0] if given else "deterministic"
            cure = CURES.get(name, "convert `k` and `v` to 16 bits, times their scales")
            raise ArgumentError(f"`{name}` and `score_mod` or `mask_mod` cannot be given together; {cure}")
        allowed = pairs(q, k, limits(window_size, causal), causal, chunk_size(attention_chunk))
        how = (float(plain_number(softcap) or 0.0), softmax_scale, dropout_p, sink, mode)
        found = modified(q, k, v, score_mod, mask_mod, allowed, *how)
    else:
        descales = descales_of(q, k, k_descale=k_descale, v_descale=v_descale, q_descale=q_descale)
        named: dict[str, Any] = {"mode": mode, "sinks": sink, "attention_chunk": attention_chunk, "descales": descales}
        found = attend(q, k, v, DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                       return_attn_probs or return_lse, **named)  # fmt: skip
    return returned(q, *found, return_attn_probs, return_lse)


def returned(q: Tensor, output: Tensor, lse: Tensor | None, return_attn_probs: bool, return_lse: bool) -> Returned:
    """What a function of flash-attention returns."""
    if return_attn_probs:
        return output, lse, q.new_empty((0,))
    return (output, lse) if return_lse else output


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **named: Any) -> Any:
    """`flash_attn_func` of qkv [batch, length, 3, heads, size]; the other arguments are the same."""
    q, k, v = unbound(qkv, "qkv", 3, "batch, length")
    return flash_attn_func(q, k, v, *arguments, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Any:
    """`flash_attn_func` of q and kv [batch, kv_len, 2, kv_heads, size]; the other arguments are the same."""
    k, v = unbound(kv, "kv", 2, "batch, length")
    return flash_attn_func(q, k, v, *arguments, **named)


front = Front()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Stored,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    lse: bool,
    *,
    mode: Mode,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
    descales: Sequence[Tensor | None] = (None, None, None),
    only_checks: bool = False,
) -> Any:
    """(O, lse) of `flash_attn_func` of tensors as `lengths` says: dense, of a cache, of one in pages, or packed, [total, heads,
    size]; lse is None unless it is wanted. `descales`, fp32 [batch or 1, kv_heads or 1], belong to keys, values and
    queries. With `only_checks`, nothing runs: the result is None, or an error."""
    dropout_p = share_of(dropout_p)
    left, right = limits(window_size, causal)
    chunk = chunk_size(attention_chunk)
    if chunk and lengths.leftpad is not None:
        raise ArgumentError("`attention_chunk` and `cache_leftpad` cannot be given together: chunks begin at row 0 of a cache")
    storage, (given, longest, cached) = lengths.storage, lengths.arguments
    inputs = [*given, *(t for t in (alibi_slopes, sinks, *descales) if t is not None)]
    if dropout_p:
        inputs.append(generator_state(q.device))
    tensors = (q, k, v, *inputs)
    how = (mode, dropout_p, softmax_scale, causal, left, right, softcap, lse, storage, cached, longest,
           sinks is not None, chunk, tuple(one is not None for one in descales))  # fmt: skip
    others = (tensors, how, alibi_slopes, sinks, deterministic)
    if only_checks:
        return _described(*others).check()
    outputs = front.call(tensors, how, _described, *others)
    output = outputs[0] if storage.startswith("packed") else results(outputs, q, "bshd", False)
    return output, outputs[1] if lse else None


def _described(tensors: Sequence[Tensor], how: How, slopes: Tensor | None, sinks: Tensor | None, deterministic: bool) -> Call:
    """The operator's call. `tensors` are q, k and v, and all inputs of the spec."""
    mode, dropout_p, softmax_scale, causal, left, right, softcap, lse, storage, cached, longest, _, chunk, scaled = how
    q, k, v, *inputs = tensors
    check_tensors(q=q, k=k, v=v, **{} if sinks is None else {"sinks": sinks})
    check_flags(deterministic=deterministic, return_attn_probs=lse)
    for name, number in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, NUMBERS)):
            raise ArgumentTypeError(f"`{name}` is a {type(number).__name__}; expected a number")
    queries, keys, values = follow_autocast(*_laid_out(q, k, v, storage))
    scale, floats = scale_of(softmax_scale, "softmax_scale")
    if scale is None and q.shape[-1] != queries.shape[-1]:
        scale = repr(index(q.shape[-1]) ** -0.5)
    text = flash_text(
        mode, storage, causal, ends(left, right), float(plain_number(softcap) or 0.0), rank(slopes, q, inputs), scale, lse,
        queries.dtype, index(queries.shape[-1]), index(values.shape[-1]), dropout_p, cached,
        index(k.shape[1]) if storage.endswith("paged") else None,
        None if sinks is None else dtype_name(sinks.dtype, "sinks"), chunk, keys.dtype, scaled,
    )  # fmt: skip
    ints = [*longest, *(n for n in (left, right) if n >= 0)]
    in_order = deterministic or torch.are_deterministic_algorithms_enabled()
    size = v.shape[-1] if needs_padding(q, v) else None
    return Call((queries, keys, values, text, inputs or None, ints, floats), mode, in_order, True, size)


def _laid_out(q: Tensor, k: Tensor, v: Tensor, storage: Storage) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the operator takes them, with head sizes that are multiples of 8. Raises ArgumentError."""
    if storage.endswith("paged"):
        for name, pool in (("k", k), ("v", v)):
            if pool.dim() != 4:
                raise ArgumentError(f"`{name}` is {list(pool.shape)}; expected [pages, page_size, kv_heads, size]")
        queries, _, _ = _laid_out(q, q, q, "packed" if storage == "packed_paged" else "dense")
        return queries, padded(k).transpose(1, 2), padded(v).transpose(1, 2)
    if storage != "packed":
        return heads_first(*padded_heads(q, k, v), "bshd")
    for name, rows in (("q", q), ("k", k), ("v", v)):
        if rows.dim() != 3:
            raise ArgumentError(f"`{name}` is {list(rows.shape)}; expected [total, heads, size]")
    return padded_heads(q, k, v)


def limits(window_size: Window, causal: bool) -> tuple[int, int]:
    """(keys before a query's position, keys after it); -1 for all. `causal` says what is after it by itself. `window_size` has
    two integers of any kind, those of a tensor too, or None for all. Raises ArgumentError."""
    try:
        left, right = (-1 if end is None else end if isinstance(end, INTS) else index(end) for end in window_size)
    except (TypeError, ValueError):
        message = f"`window_size` is {window_size!r}; expected two ints or None: of keys before a position, and after it"
        raise ArgumentError(message) from None
    return min(max(left, -1), MAX_LENGTH), -1 if causal else min(max(right, -1), MAX_LENGTH)


def chunk_size(attention_chunk: int | None) -> int:
    """The size of chunks, a constant of the kernel; 0 without them. Raises ArgumentError."""
    try:
        size = 0 if attention_chunk is None else int(plain_number(index(attention_chunk)) or 0)
    except TypeError:
        raise ArgumentTypeError(f"`attention_chunk` is a {type(attention_chunk).__name__}; expected an int") from None
    if not 0 <= size <= MAX_LENGTH:
        raise ArgumentError(f"`attention_chunk` is {size}; expected a number of keys, or 0")
    return size


def pairs(q: Tensor, k: Tensor, window: tuple[int, int], causal: bool, chunk: int) -> Mod | None:
    """The mask of dense tensors as a function (row, key); None if all pairs take part."""
    left, right = window
    if not (causal or chunk or left >= 0 or right >= 0):
        return None

    def allowed(row: Tensor, key: Tensor) -> Tensor:
        position = row + (k.shape[1] - q.shape[1])
        found = key >= 0
        for holds, condition in (
            (causal, position >= key),
            (left >= 0, position - key <= left),
            (right >= 0, key - position <= right),
        ):
            found = found & condition if holds else found
        return found & (position // chunk == key // chunk) if chunk else found

    return allowed


def ends(left: int, right: int) -> tuple[str, ...]:
    """The ends that a window has: each is a param of the spec."""
    return tuple(name for name, n in (("left", left), ("right", right)) if n >= 0)


def unbound(packed: Tensor, name: str, count: int, rows: str) -> tuple[Tensor, ...]:
    """The tensors that lie side by side in `packed`, after its dimensions `rows`: views, whose gradients one copy joins."""
    axis = rows.count(",") + 1
    check_tensors(**{name: packed})
    if packed.dim() != axis + 3 or packed.shape[axis] != count:
        raise ArgumentError(f"`{name}` is {list(packed.shape)}; expected [{rows}, {count}, heads, size]")
    return packed.unbind(axis)


def rank(slopes: Tensor | None, q: Tensor, lengths: Sequence[Tensor] = ()) -> int:
    """The number of dimensions of `alibi_slopes`; 0 without it. q is [batch, length, heads, size], or packed by the first of
    `lengths`. Raises ArgumentError."""
    if slopes is None:
        return 0
    if not isinstance(slopes, torch.Tensor) or slopes.dtype is not torch.float32:
        found = f"has elements of {slopes.dtype}" if isinstance(slopes, torch.Tensor) else f"is a {type(slopes).__name__}"
        raise ArgumentTypeError(f"`alibi_slopes` {found}; expected torch.float32")
    heads, batch = q.shape[-2], q.shape[0] if q.dim() == 4 else lengths[0].shape[0] - 1
    if slopes.dim() not in (1, 2) or slopes.shape not in ((heads,), (batch, heads)):
        raise ArgumentError(
            f"`alibi_slopes` is {list(slopes.shape)}; expected [heads] or [batch, heads], of which `q` has {heads} and {batch}"
        )
    return int(slopes.dim())


@constant
def flash_text(
    mode: Mode,
    storage: Storage,
    causal: bool,
    limited: tuple[str, ...],
    softcap: float,
    alibi_rank: int,
    scale: str | None,
    lse: bool,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    dropout_p: float = 0,
    cached: tuple[str, ...] = (),
    page_size: int | None = None,
    sinks: str | None = None,
    chunk: int = 0,
    kv_dtype: torch.dtype | None = None,
    scaled: Sequence[bool] = (False, False, False),
) -> str:
    """The text of flash-attention's attention, with `slopes` if `alibi_rank` and a param for each `limited` end of a window.
    `cached` names what is known of keys, by the names of `attngen.spec.cached`. `sinks` is the element type of sinks, if there
    are any. `kv_dtype` is the type of keys and values if they have 8 bits, and `scaled` says whether those, and queries, are
    multiplied with scales of their own, `k_descale`, `v_descale` and `q_descale`. `chunk` above 0 is the size of chunks of
    positions: how far they reach is said too, as a range of keys that kernels solve for."""
    check_mode(mode)
    if not isfinite(softcap):
        raise ArgumentError(f"`softcap` is {softcap}; expected a finite number")
    if storage != "dense" and mode == "math":
        raise ArgumentError(f'mode="math" does not support {storage} tensors; call flash_attn_func for each sequence')
    position = "q + kv_len - q_len"  # position of a query among the keys
    masks = [f"{position} >= k"] if causal else []
    masks += [WITHIN[end].format(position=position) for end in limited]
    if chunk:
        masks += [f"{position} - k < {chunk}", *([] if causal else [f"k - ({position}) < {chunk}"])]
        masks.append(f"({position}) // {chunk} == k // {chunk}")
    score = f"softcap({softcap!r})" if softcap > 0.0 else "s"
    if alibi_rank:
        distance = f"{position} - k" if causal else f"abs({position} - k)"
        score += f" - slopes[{'h' if alibi_rank == 1 else 'b, h'}] * ({distance})"
    inputs: dict[str, tuple[str, tuple[int | str, ...]]] = {}
    if alibi_rank:
        inputs["slopes"] = ("fp32", ("heads",) if alibi_rank == 1 else ("batch", "heads"))
    if sinks:
        inputs["sinks"] = (sinks, ("heads",))
    of_head = "[b, h // (heads // kv_heads)]"
    found = [f"{t}_descale" for t, is_scaled in zip("kvq", scaled, strict=False) if is_scaled]
    inputs |= dict.fromkeys(found, ("fp32", ("batch", "kv_heads")))
    of_scores = " * ".join(f"{name}{of_head}" for name in ("q_descale", "k_descale") if name in found)
    scales = {"k_scale": of_scores or None, "v_scale": f"v_descale{of_head}" if "v_descale" in found else None}
    keywords = {
        **scales,
        "mask": " and ".join(masks) or None,
        "score": score,
        "sink": "sinks[h]" if sinks else None,
        "inputs": inputs,
        "params": dict.fromkeys(limited, "int"),
        "storage": storage,
        "page_size": page_size,
        "dropout": dropout_p,
    }
    description = Description(mode, False, scale, lse, keywords)
    spec = description.spec(stored_types(dtype, kv_dtype, mode), head_dim, head_dim_v, None)
    return one_line(of_cache(spec, cached))
