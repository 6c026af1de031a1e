"""`attention`, with the arguments of torch's scaled_dot_product_attention, for arrays of any library; its spec and checks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from numbers import Real
from typing import Any, Protocol

from attngen.api import CompiledAttention, check_schedule, compile_later
from attngen.device.arrays import CPU, ArgumentError, ArgumentTypeError, ArrayView, empty_like, view
from attngen.device.params import signed
from attngen.device.select import warn_emulated
from attngen.diagnostics import counted, refuse_keywords
from attngen.keywords import ScheduleName
from attngen.spec.attention import AttentionSpec
from attngen.spec.check import check
from attngen.spec.dropout import RNG_STATE
from attngen.spec.dtypes import STORAGE_DTYPES
from attngen.spec.expr import MAX_FLOAT, Type, name
from attngen.spec.operator import apply
from attngen.spec.scales import SOFTMAX_SCALE


def attention(
    query: object,
    key: object,
    value: object,
    attn_mask: object = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mode: ScheduleName = "auto",
    seed: int | None = None,
    offset: int = 0,
    **unknown: object,
) -> Any:
    """softmax(scale * q k^T + attn_mask) v: torch's scaled_dot_product_attention, for arrays of any library.

    query [batch, q_heads, q_len, head_dim], key [batch, kv_heads, kv_len, head_dim] and value [batch, kv_heads, kv_len,
    head_dim_v]; without batch, or without batch and heads, as well. `attn_mask` is boolean (true: take part) or of floats
    (added to the scores), and broadcasts to [batch, q_heads, q_len, kv_len]. Fewer key/value heads than query heads need
    `enable_gqa`. `mode` is naive, tiled, fused, wgmma, hopper, decode or auto.

    `dropout_p` is the share of weights that are dropped, rounded to a multiple of 1/256. Which ones follows from `seed` and
    `offset`, whole numbers of 64 bits. Arrays need a seed; for tensors, torch's generator draws both.

    Returns an array of query's library. Tensors are handed to `attngen.torch.attention`. Raises ArgumentError, and
    ArgumentTypeError (also a TypeError) for elements of a type that cannot be used.
    """
    if unknown:
        refuse_renamed(unknown, attention)
    check_dropout(dropout_p)
    number = plain_scale(scale)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    torch = sys.modules.get("torch")
    if _tensor_functions and torch is not None and isinstance(query, torch.Tensor):
        usual = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _tensor_functions[-1](*usual, mode=mode, seed=seed, offset=offset)
    floats = MASK_DTYPES[1:]
    given = (view(query, "q", floats), view(key, "k", floats), view(value, "v", floats))
    q, k, v = (_four_dimensions(array) for array in given)
    check_ranks({array.name: len(array.shape) for array in given})
    if not enable_gqa:
        check_equal_heads(q, k)
    arrays = {"q": q, "k": k, "v": v}
    mask_dtype, axes = None, ALL_AXES
    if attn_mask is not None:
        mask = _four_dimensions(view(attn_mask, "attn_mask", MASK_DTYPES))
        is_same = [n == 1 or (stride == 0 and n > 1) for n, stride in zip(mask.shape, mask.strides, strict=True)]
        axes = mask_axes(is_same, k.shape[2] == 1)
        arrays["attn_mask"] = _without_broadcasts(mask, axes)
        mask_dtype = mask.dtype.name
    check_schedule("mode", mode)
    if dropout_p:
        if seed is None:
            raise ArgumentError("dropout needs a seed; pass seed=..., and offset=... to tell calls apart")
        state = empty_like(q, (2,), RNG_STATE.dtype, RNG_STATE.name)
        state.owner[0], state.owner[1] = signed("seed", seed), signed("offset", offset)
        arrays[RNG_STATE.name] = state
    if q.location == CPU:
        warn_emulated("attngen.attention on arrays of the CPU", "Pass arrays of a GPU, as CuPy has them.")
    written, params = written_scale(number)
    spec = standard_spec(q.dtype.name, q.shape[3], v.shape[3], mask_dtype, is_causal, written, float(dropout_p), axes)
    compiled = _standard(spec, mode, "emulated" if q.location == CPU else str(q.location))
    output = compiled.run(arrays, params)["out"]
    return output.reshape((*given[0].shape[:-1], v.shape[3])) if len(given[0].shape) < 4 else output


_tensor_functions: list[Callable[..., object]] = []


def register_tensor_function(attention: Callable[..., object]) -> None:
    """Registers `attention` for torch tensors."""
    _tensor_functions.append(attention)


def _four_dimensions(array: ArrayView) -> ArrayView:
    """`array` with leading dimensions of size 1, [batch, heads, length, size]."""
    missing = 4 - len(array.shape)
    if missing < 0 or len(array.shape) < 2:
        raise ArgumentError(
            f"`{array.name}` has {counted(len(array.shape), 'dimension')}; expected 2 to 4, of [batch, heads, length, "
            "head size]"
        )
    return replace(array, shape=(1,) * missing + array.shape, strides=(0,) * missing + array.strides)


def mask_axes(broadcast: Sequence[bool], has_one_key: bool) -> str:
    """The axes of a dense mask that a spec indexes: those along which its elements differ; `broadcast` are the others.

    The batch is always indexed, which costs nothing and lets vmap fold samples into it. So is a single key: a cache of one key
    needs no kernel of its own.
    """
    kept = {"b", "k"} if has_one_key else {"b"}
    return "".join(axis for axis, is_same in zip(ALL_AXES, broadcast, strict=True) if axis in kept or not is_same)


def _without_broadcasts(mask: ArrayView, axes: str) -> ArrayView:
    """A mask of four dimensions with those of `axes` alone."""
    kept = [at for at, axis in enumerate(ALL_AXES) if axis in axes]
    return replace(mask, shape=tuple(mask.shape[at] for at in kept), strides=tuple(mask.strides[at] for at in kept))


def check_ranks(ranks: Mapping[str, int]) -> None:
    """Raises ArgumentError if q, k and v differ in their number of dimensions."""
    for array, rank in ranks.items():
        if rank != ranks["q"]:
            raise ArgumentError(
                f"`q` has {counted(ranks['q'], 'dimension')} and `{array}` has {rank}; expected the same number"
            )


class HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def check_equal_heads(q: HasShape, k: HasShape) -> None:
    """Raises ArgumentError if query heads would share key/value heads."""
    if q.shape[1] != k.shape[1]:
        raise ArgumentError(f"`q` has {q.shape[1]} heads and `k` {k.shape[1]}; pass enable_gqa=True to share them")


def check_flags(**flags: object) -> None:
    """Raises ArgumentTypeError for what is neither True nor False, such as another argument in the place of a flag."""
    for keyword, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentTypeError(f"`{keyword}` is {flag!r}; expected True or False")


def check_dropout(dropout_p: float, name: str = "dropout_p") -> None:
    """Raises ArgumentError, or ArgumentTypeError, for what is no share of weights to drop. `name` is the argument's."""
    try:
        is_share = 0.0 <= dropout_p < 1.0
    except TypeError:
        message = f"{name} is a {type(dropout_p).__name__}; expected a number from 0 to below 1"
        raise ArgumentTypeError(message) from None
    if not is_share:
        raise ArgumentError(f"{name} is {dropout_p!r}; expected a number from 0 to below 1")


Scale = float | str | None  # an argument: a number, the text of a constant, or None for the default


def plain_scale(scale: object, name: str = "scale") -> Scale:
    """`scale` as a float, if it is a number. Raises ArgumentTypeError for what is neither a number, nor the text of one, nor
    None, and ArgumentError for one that is not finite. `name` is the argument's."""
    if scale is None or isinstance(scale, str):
        return scale
    if not isinstance(scale, Real):
        if hasattr(scale, "shape"):
            kind = type(scale).__name__
            raise ArgumentTypeError(f"`{name}` is a {kind}; expected a number. Multiply the query by it, and pass {name}=1.0")
        raise ArgumentTypeError(f"`{name}` is {scale!r}; expected a number")
    number = float(scale)
    if not abs(number) <= MAX_FLOAT:
        raise ArgumentError(f"`{name}` is {number}; expected a finite number of fp32")
    return number


def written_scale(scale: Scale) -> tuple[str | None, dict[str, float]]:
    """(the scale as a spec states it, the params of a call): a number is a param, so that one kernel serves all numbers."""
    return (scale, {}) if scale is None or isinstance(scale, str) else (SOFTMAX_SCALE, {SOFTMAX_SCALE: scale})


def scale_params(written: str | None) -> dict[str, str]:
    """The params, with their types, that a scale reads as `written_scale` writes it."""
    return {SOFTMAX_SCALE: "float"} if written == SOFTMAX_SCALE else {}


_RENAMED = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask"}


def refuse_renamed(unknown: Mapping[str, object], function: Callable[..., object]) -> None:
    """Raises TypeError for an unknown keyword of `function`, with torch's name if it is another name of an argument."""
    for keyword in unknown:
        if keyword in _RENAMED:
            raise TypeError(f"attention has no keyword `{keyword}`; torch's name for it is `{_RENAMED[keyword]}`")
    refuse_keywords("attention", unknown, [name for name in signature(function).parameters if name != "unknown"])


@lru_cache(maxsize=256)
def _standard(spec: AttentionSpec, mode: str, device: str) -> CompiledAttention:
    return compile_later(spec, device, mode)


MASK_DTYPES = ("bool", *(dtype.name for dtype in STORAGE_DTYPES))
MASK_DIMS = {"b": "batch", "h": "heads", "q": "q_len", "k": "kv_len"}  # dimensions of a dense mask, by the index of each
ALL_AXES = "".join(MASK_DIMS)
CAUSAL = apply("ge", name("q", Type.INT), name("k", Type.INT))


@lru_cache(maxsize=4096)
def standard_spec(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    mask: str | None,
    is_causal: bool,
    scale: str | None,
    dropout_p: float = 0.0,
    axes: str = ALL_AXES,
) -> AttentionSpec:
    """torch's attention: `mask` is the element type of a dense mask with these `axes`, or None; `scale` as `written_scale`
    writes it. Raises DiagnosticError, ArgumentTypeError."""
    from attngen.language import define

    if mask is not None and mask not in MASK_DTYPES:
        raise ArgumentTypeError(
            f"`attn_mask` has elements of {mask}; expected bool (true: take part), or {', '.join(MASK_DTYPES[1:])} (added to "
            "the scores). Convert it, as in attn_mask.bool()"
        )
    entry = f"attn_mask[{', '.join(axes)}]"
    spec = define(
        name="attention",
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
        params=scale_params(scale),
        dropout=dropout_p,
        inputs={} if mask is None else {"attn_mask": (mask, tuple(MASK_DIMS[axis] for axis in axes))},
        mask=entry if mask == "bool" else None,
        score=f"s + {entry}" if mask not in (None, "bool") else None,
    )
    return also_causal(spec) if is_causal else spec


def also_causal(spec: AttentionSpec) -> AttentionSpec:
    """`spec` with `q >= k` added to its mask. Raises DiagnosticError if the mask becomes too large."""
    both = replace(spec, mask=CAUSAL if spec.mask is None else apply("and", CAUSAL, spec.mask))
    check(both)
    return both
