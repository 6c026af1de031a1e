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


def heads_first(tensor: Tensor, name: str, layout: str, copy: bool) -> Tensor:
    """`tensor` as [batch, heads, length, size]: a view, or a copy where `copy` allows one and it cannot be read in place."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"`{name}` is a {type(tensor).__name__}; expected a tensor")
    if tensor.dim() != 4:
        raise ArgumentError(f"`{name}` has {tensor.dim()} dimensions; expected 4: {layout}")
    seen = tensor.transpose(1, 2) if layout == "bshd" else tensor
    return seen.clone(memory_format=torch.contiguous_format) if copy and not readable(seen) else seen


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
