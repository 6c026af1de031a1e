"""An attention without element type and head sizes, which tensors add: together they give the spec's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any, get_args

import torch

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.language import to_text, traced
from attngen.sdpa import also_causal, standard_spec
from attngen.spec.attention import AttentionSpec, Rung
from attngen.spec.dtypes import DTYPES, STORAGE_DTYPES

Written = str | Callable[..., Any] | None
MODES: tuple[str, ...] = get_args(Rung)


@dataclass(frozen=True, eq=False)
class Description:
    """The keywords of `attngen.define` except dtype and head sizes; `mode` is the rung."""

    mode: Rung = "auto"
    is_causal: bool = False
    scale: float | None = None
    return_lse: bool = False
    keywords: Mapping[str, Any] | None = None

    def spec(self, dtype: str, head_dim: int, head_dim_v: int, mask_dtype: str | None) -> tuple[AttentionSpec, dict[str, Any]]:
        """(spec, captured arrays). `mask_dtype` is the element type of a dense mask, or None. Raises DiagnosticError."""
        if self.keywords is None:
            spec = standard_spec(dtype, head_dim, head_dim_v, mask_dtype, self.is_causal, self.scale)
            captured: dict[str, Any] = {}
        else:
            keywords = {"scale": self.scale, "lse": self.return_lse, **self.keywords}
            spec, captured = traced(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, **keywords)
            if self.is_causal:
                spec = also_causal(spec)
        return replace(spec, lse=self.return_lse, schedule=replace(spec.schedule, rung=self.mode)), captured


def check_mode(mode: str) -> None:
    """Raises ArgumentError for an unknown mode."""
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; expected {', '.join(MODES)}")


_known: list[Description] = []


def register(description: Description) -> int:
    """A number for `description`: functions that torch.compile traces may hold a number, but no object."""
    _known.append(description)
    return len(_known) - 1


@lru_cache(maxsize=4096)
def _text(number: int, dtype: Any, head_dim: int, head_dim_v: int, captured_dtypes: tuple[Any, ...]) -> str:
    spec, captured = _known[number].spec(dtype_name(dtype), head_dim, head_dim_v, None)
    converted = {name: _DTYPES[dtype] for name, dtype in zip(captured, captured_dtypes, strict=True)}
    return to_text(replace(spec, inputs=tuple(replace(i, dtype=converted.get(i.name, i.dtype)) for i in spec.inputs)))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def spec_text(number: int, dtype: Any, head_dim: int, head_dim_v: int, captured_dtypes: tuple[Any, ...]) -> str:
    """The text of a registered description for tensors of these types and sizes; a constant to torch.compile. `captured_dtypes`
    are the current types of captured tensors, which a layer's `.to()` may have changed."""
    return _text(number, dtype, head_dim, head_dim_v, captured_dtypes)


def head_size(tensor: Any) -> int:
    """The last size of `tensor` as a plain number: torch.compile recompiles for another."""
    return index(tensor.shape[3])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def standard_text(
    mode: Rung,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    dtype: Any,
    head_dim: int,
    head_dim_v: int,
    mask_dtype: Any,
) -> str:
    """The text of torch's attention; a constant to torch.compile."""
    return _standard_text(mode, is_causal, scale, return_lse, dtype, head_dim, head_dim_v, mask_dtype)


@lru_cache(maxsize=4096)
def _standard_text(
    mode: Rung,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    dtype: Any,
    head_dim: int,
    head_dim_v: int,
    mask_dtype: Any,
) -> str:
    check_mode(mode)
    description = Description(mode, is_causal, scale, return_lse)
    spec, _ = description.spec(dtype_name(dtype), head_dim, head_dim_v, _mask_name(mask_dtype))
    return to_text(spec)


_DTYPES = {getattr(torch, t.torch): t for t in DTYPES.values()}
_STORAGE_NAMES = {getattr(torch, t.torch): t.name for t in STORAGE_DTYPES}


def dtype_name(dtype: Any) -> str:
    """attngen's name of a torch dtype of Q, K and V. Raises ArgumentTypeError for an unsupported one."""
    if dtype not in _STORAGE_NAMES:
        found = str(dtype).removeprefix("torch.")
        raise ArgumentTypeError(f"`q` has elements of {found}; expected one of {', '.join(_STORAGE_NAMES.values())}")
    return _STORAGE_NAMES[dtype]


def _mask_name(dtype: Any) -> str | None:
    """attngen's name of the dtype of a dense mask; torch's if attngen has none; None without a mask."""
    if dtype is None:
        return None
    return _STORAGE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def fixed_text(spec: AttentionSpec, rung: str | None) -> str:
    """The text of a complete spec; `rung` overrides the spec's own."""
    if rung is not None:
        check_mode(rung)
    return to_text(replace(spec, schedule=spec.schedule.overridden(rung)))
