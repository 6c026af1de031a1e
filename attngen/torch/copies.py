"""Copies that kernels can read: contiguous, and from a multiple of 16 bytes on.

    copy(Tensor x) -> Tensor

An operator of its own, because torch.compile removes a clone that has the strides of its source, although the source may start
elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch

from attngen.torch.operator import LIBRARY

Tensor = Any


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy of `tensor`, in memory of its own."""
    is_traced = torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0  # by a mode, below Dynamo
    return torch.ops.attngen.copy.default(tensor) if is_traced else _clone(tensor)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _gradient(_: Any, gradient: Tensor) -> Tensor:
    return gradient


LIBRARY.define("copy(Tensor x) -> Tensor")
LIBRARY.impl("copy", _clone, "CompositeExplicitAutograd")
torch.library.register_autograd("attngen::copy", _gradient, lib=LIBRARY)
torch.library.register_vmap("attngen::copy", lambda info, dims, x: (copied(x), dims[0]), lib=LIBRARY)
