"""Copies of tensors that kernels cannot read in place. The operators make them when they run, because torch.compile does not
know where a tensor starts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attngen.device.arrays import has_heads_inside

ROW_BYTES = 16  # size of one copy of the fused kernels


def has_whole_rows(tensor: Tensor, row_bytes: int = ROW_BYTES) -> bool:
    """Whether rows are contiguous, and the distances between them multiples of so many bytes."""
    *outer, last = tensor.stride()
    whole = row_bytes // tensor.element_size()  # elements
    return last == 1 and not any(stride % whole for stride in outer)


def in_place(tensor: Tensor) -> Tensor:
    """`tensor` if every schedule can read it where it lies, else a copy in the same order of dimensions."""
    if has_whole_rows(tensor) and not tensor.data_ptr() % ROW_BYTES:
        return tensor
    if tensor.stride(0) == 0 and tensor.shape[0] > 1:  # batch 1, used for every batch
        return in_place(tensor[:1]).expand_as(tensor)
    return empty_as(tensor, tensor.shape, tensor).copy_(tensor)


def empty_as(like: Tensor, shape: Sequence[int], order: Tensor | None) -> Tensor:
    """A tensor of that shape and of the type of `like`: contiguous, or with its dimensions in the order of `order`'s memory."""
    if order is not None and len(shape) == 4 and has_heads_inside(order.stride()):
        batch, heads, length, size = shape
        return like.new_empty((batch, length, heads, size)).transpose(1, 2)
    return like.new_empty(shape)
