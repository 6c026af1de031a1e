"""An attention without element type and head sizes, which tensors add: together they give the spec's text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any, Literal, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attngen.api import check_schedule
from attngen.cache.disk_cache import digest
from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.keywords import ScheduleName
from attngen.language import define, to_text, traced
from attngen.schedules import overridden
from attngen.sdpa import ALL_AXES, also_causal, plain_scale, scale_params, standard_spec
from attngen.shipped import PACKAGE
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES, FP8_DTYPES, INPUT_DTYPES, STORAGE_DTYPES, DType
from attngen.spec.scales import SOFTMAX_SCALE
from attngen.torch.layout import padding_of
from attngen.torch.private import constant_to_dynamo

F = TypeVar("F", bound=Callable[..., object])
Written = str | Callable[..., object] | None
Keywords = Mapping[str, Any]  # keywords of `attngen.define`
Mode = ScheduleName | Literal["math"]  # a schedule, or torch's own operations (`attngen.torch.math`)


@dataclass(frozen=True, eq=False)
class Description:
    """The keywords of `attngen.define` except dtype and head sizes, without functions; `mode` is the schedule, or "math"."""

    mode: Mode = "auto"
    is_causal: bool = False
    scale: str | None = None  # as `written_scale` writes it
    return_lse: bool = False
    keywords: Keywords | None = None
    dropout_p: float = 0.0  # for torch's attention, which has no keywords

    def spec(
        self, dtype: str | dict[str, str], head_dim: int, head_dim_v: int, mask_dtype: str | None, axes: str = ALL_AXES
    ) -> AttentionSpec:
        """The spec for these head sizes, rounded up to multiples of 8, as `padded_heads` does with tensors; the scale does not
        change. `dtype` has a type for each tensor if they differ. `mask_dtype` is the element type of a dense mask with these
        `axes`, or None. Raises DiagnosticError, ArgumentError."""
        scale = repr(1 / math.sqrt(head_dim)) if self.scale is None and padding_of(head_dim) else self.scale
        sizes = head_dim + padding_of(head_dim), head_dim_v + padding_of(head_dim_v)
        if self.keywords is None:
            own = dtype if isinstance(dtype, str) else dtype["o"]
            spec = standard_spec(own, *sizes, mask_dtype, self.is_causal, scale, self.dropout_p, axes)
            spec = spec if isinstance(dtype, str) else _with_types(spec, dtype)
        else:
            params = {**self.keywords.get("params", {}), **scale_params(scale)}
            keywords = {"scale": scale, "lse": self.return_lse, **self.keywords, "params": params}
            spec = define(dtype=dtype, head_dim=sizes[0], head_dim_v=sizes[1], **keywords)
            if spec.rotary is not None and spec.rotary.dim > head_dim:
                raise ArgumentError(f"`rotary` rotates {spec.rotary.dim} elements; expected at most the head size, {head_dim}")
            if self.is_causal:
                spec = also_causal(spec)
        kernel = replace(spec.kernel, schedule=cast(ScheduleName, schedule_of(self.mode) or "auto"))
        return replace(spec, lse=self.return_lse, kernel=kernel)


def _with_types(spec: AttentionSpec, names: dict[str, str]) -> AttentionSpec:
    """`spec`, with a type for each tensor."""
    q, *others = (DTYPES[names[tensor]] for tensor in "qkvo")
    k, v, o = (None if dtype is q else dtype for dtype in others)
    return replace(spec, dtype=q, k_dtype=k, v_dtype=v, o_dtype=o)


def check_mode(mode: str) -> None:
    """Raises ArgumentError for a mode that does not exist."""
    check_schedule("mode", mode, "math")


def schedule_of(mode: str) -> str | None:
    """The schedule that a mode names; None if that is the spec's own."""
    return None if mode in ("auto", "math") else mode


_shared: WeakValueDictionary[str, Description] = WeakValueDictionary()  # by their repr; layers own them


def constant(function: F) -> F:
    """`function` with its results remembered, which are constants to torch.compile."""
    remembered = lru_cache(maxsize=4096)(function)

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return remembered(*arguments, **named)
        except TypeError:  # an argument without a hash, which the function refuses by its name
            return function(*arguments, **named)

    call.__doc__ = function.__doc__
    call.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    constant_to_dynamo(call)
    return cast(F, call)


def shared(description: Description) -> Description:
    """The description that stands for all with the same meaning. Functions that torch.compile traces may hold its repr, but no
    object; layers with the same repr share the code that torch.compile generates."""
    return _shared.setdefault(repr(description), description)


def without_functions(keywords: Keywords, dtype: str, head_size: int) -> tuple[Keywords, dict[str, object]]:
    """(`keywords` with the expressions of functions in their place, captured arrays, which are inputs of these expressions).

    What functions refer to may change later; specs of other element types and head sizes have the same expressions. Raises
    DiagnosticError, TraceError.
    """
    spec, captured = traced(dtype=dtype, head_dim=head_size, **keywords)
    expressions = {name: getattr(spec, name) for name, value in keywords.items() if callable(value)}
    inputs = {i.name: (i.dtype.name, i.dims) for i in spec.inputs if i.name in captured}
    return {**keywords, **expressions, "inputs": {**keywords.get("inputs", {}), **inputs}}, captured


@constant
def spec_text(
    described: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, captured: tuple[tuple[str, torch.dtype], ...]
) -> str:
    """The text of the `shared` description with this repr, for tensors of these types and sizes. `captured` are the current
    types of captured tensors by name, which a layer's `.to()` may have changed."""
    description = _shared[described]
    mode = description.mode
    spec = description.spec(stored_types(dtype, None, mode), head_dim, head_dim_v, None)
    converted = {name: _element_type(name, stated_dtype(found, mode)) for name, found in captured}
    return one_line(replace(spec, inputs=tuple(replace(i, dtype=converted.get(i.name, i.dtype)) for i in spec.inputs)))


def scale_of(scale: object, name: str = "scale") -> tuple[str | None, list[float]]:
    """(the scale as a text states it, the operator's floats). torch.compile may have a symbol for the number, which any
    question about it would make a constant: the call itself checks it. Raises ArgumentError, as `plain_scale`."""
    if scale is None or isinstance(scale, str):
        return scale, []
    number: Any = scale if torch.compiler.is_compiling() else plain_scale(scale, name)
    return SOFTMAX_SCALE, [number]


def plain_number(number: float | None) -> float | None:
    """`number` as a plain one: torch.compile recompiles for another, also with `dynamic=True`, where it is a symbol."""
    if number is None or not torch.compiler.is_compiling():
        return number
    return torch.fx.experimental.symbolic_shapes.guard_scalar(number)  # imported by torch.compile, in half a second


def head_size(tensor: Tensor) -> int:
    """The last size of `tensor` as a plain number: torch.compile recompiles for another."""
    return index(tensor.shape[3])


@constant
def standard_text(
    mode: Mode,
    is_causal: bool,
    scale: str | None,
    return_lse: bool,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    mask_dtype: torch.dtype | None,
    dropout_p: float = 0.0,
    axes: str = ALL_AXES,
) -> str:
    """The text of torch's attention, by the arguments of `attention`, torch's element types, None for no mask, and the mask's
    `axes`."""
    check_mode(mode)
    description = Description(mode, is_causal, scale, return_lse, dropout_p=dropout_p)
    mask = None
    if mask_dtype is not None:
        stated = stated_dtype(mask_dtype, mode)
        mask = _STORAGE_NAMES.get(stated, str(stated).removeprefix("torch."))  # torch's name of a type that is refused
    spec = description.spec(stored_types(dtype, None, mode), head_dim, head_dim_v, mask, axes)
    return one_line(spec)


def stated_dtype(dtype: torch.dtype, mode: Mode) -> torch.dtype:
    """The element type that a text states for tensors of `dtype`: the language has no fp64, which mode "math" computes too, in
    the tensors' own precision."""
    return torch.float32 if mode == "math" and dtype is torch.float64 else dtype


def stored_types(dtype: torch.dtype, kv_dtype: torch.dtype | None, mode: Mode) -> str | dict[str, str]:
    """The types that a text states for queries of `dtype`, and for keys and values of `kv_dtype` if they have 8 bits. Queries
    of 8 bits have results of bf16, as in FlashAttention-3."""
    if dtype in CACHE_TYPES:
        queries, keys = CACHE_TYPES[dtype].name, CACHE_TYPES.get(kv_dtype or dtype)
        if keys is None:
            found = str(kv_dtype).removeprefix("torch.")
            raise ArgumentTypeError(f"`q` has elements of {queries}, and `k` of {found}; expected keys and values of 8 bits")
        return {"q": queries, "k": keys.name, "v": keys.name, "o": "bf16"}
    own = dtype_name(stated_dtype(dtype, mode))
    cached = CACHE_TYPES.get(kv_dtype) if kv_dtype is not None else None
    return own if cached is None else {"q": own, "k": cached.name, "v": cached.name}


CACHE_TYPES = {getattr(torch, t.torch): t for t in FP8_DTYPES}  # types of keys and values beside queries of another type
ELEMENT_TYPES = {getattr(torch, t.torch): t for t in INPUT_DTYPES}
_STORAGE_NAMES = {getattr(torch, t.torch): t.name for t in STORAGE_DTYPES}


def dtype_name(dtype: torch.dtype, argument: str = "q") -> str:
    """attngen's name of a torch dtype of Q, K and V, or of another argument. Raises ArgumentTypeError if it has none."""
    if dtype not in _STORAGE_NAMES:
        found = str(dtype).removeprefix("torch.")
        raise ArgumentTypeError(f"`{argument}` has elements of {found}; expected one of {', '.join(_STORAGE_NAMES.values())}")
    return _STORAGE_NAMES[dtype]


def _element_type(name: str, dtype: torch.dtype) -> DType:
    """attngen's type of the elements of a captured tensor. Raises ArgumentTypeError if it has none."""
    if dtype not in ELEMENT_TYPES:
        expected = ", ".join(known.name for known in ELEMENT_TYPES.values())
        raise ArgumentTypeError(f"`{name}` has elements of {str(dtype).removeprefix('torch.')}; expected one of {expected}")
    return ELEMENT_TYPES[dtype]


def fixed_text(spec: AttentionSpec, schedule: str | None) -> str:
    """The text of a complete spec; `schedule` overrides the spec's own."""
    if schedule is not None:
        check_schedule("mode", schedule)
    return one_line(replace(spec, kernel=overridden(spec.kernel, schedule)))


def one_line(spec: AttentionSpec) -> str:
    """The spec's text without line breaks: torch.compile writes an operator's arguments into comments of the code that it
    generates, and prefixes only the first line of each. At its end is `sources`, as a comment."""
    return f"{' '.join(to_text(spec).split())} # attngen {sources()}"


@constant
def sources() -> str:
    """A digest of attngen's sources. torch keeps graphs on disk in which attngen's operators have become others, and finds one
    by the operators and their arguments: other sources must find none."""
    files = sorted(file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".lark", ".attn"))
    return digest(*(part for file in files for part in (str(file.relative_to(PACKAGE)), file.read_text("utf-8"))))
