"""Tensors as the operator takes them: [batch, heads, length, size], read in place."""

from __future__ import annotations

from typing import Any

import torch

from attngen.device.arrays import ArgumentError, ArgumentTypeError

Tensor = Any
LAYOUTS = ("bhsd", "bshd")
ROW_BYTES = 16  # what the fused kernels copy at once


def check_layout(layout: str) -> None:
    """Raise ArgumentError for what is no layout."""
    if layout not in LAYOUTS:
        raise ArgumentError(
            f"layout is {layout!r}; expected bhsd for [batch, heads, length, size] or bshd for [batch, length, heads, size]"
        )


def heads_first(q: Tensor, k: Tensor, v: Tensor, layout: str, copy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as [batch, heads, length, size]: views, or copies where `copy` allows them and one cannot be read in place."""
    if layout == "bhsd" and not copy and all_tensors(q, k, v) and q.dim() == k.dim() == v.dim() == 4:  # as usual
        return q, k, v
    check_layout(layout)
    return _one(q, "q", layout, copy), _one(k, "k", layout, copy), _one(v, "v", layout, copy)


def all_tensors(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v are tensors of torch."""
    return isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)


def _one(tensor: Tensor, name: str, layout: str, copy: bool) -> Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"`{name}` is a {type(tensor).__name__}; expected a tensor")
    if tensor.dim() != 4:
        raise ArgumentError(f"`{name}` has {tensor.dim()} dimensions; expected 4: {layout}")
    seen = tensor.transpose(1, 2) if layout == "bshd" else tensor
    return seen.clone(memory_format=torch.contiguous_format) if copy and not readable(seen) else seen


def check_equal_heads(q: Tensor, k: Tensor) -> None:
    """Raise ArgumentError where key/value heads would be shared."""
    if q.shape[1] != k.shape[1]:
        raise ArgumentError(f"`q` has {q.shape[1]} heads and `k` {k.shape[1]}; pass enable_gqa=True to share them")


def readable(tensor: Tensor) -> bool:
    """Whether every rung can read `tensor` in place: whole rows, each at a multiple of 16 bytes."""
    size = tensor.element_size()
    whole = tensor.stride(3) == 1 and tensor.storage_offset() * size % ROW_BYTES == 0
    return whole and all(tensor.stride(d) * size % ROW_BYTES == 0 for d in range(3))


def four_dimensions(mask: Tensor) -> Tensor:
    """A mask that broadcasts to [batch, heads, q_len, kv_len], with four dimensions."""
    if mask.dim() > 4:
        raise ArgumentError(f"the mask has {mask.dim()} dimensions; expected at most 4: [batch, heads, q_len, kv_len]")
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
