"""Whether torch's dispatcher may be skipped: nothing but the kernel would see a call of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

Tensor = Any
_USUAL_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)
_LISTENERS = ~_USUAL_KEYS.raw_repr()  # any other included key traces, transforms or replaces calls
_PLAIN, _PARAMETER = torch.Tensor, torch.nn.Parameter


def is_observed() -> bool:
    """Whether something of torch would see a call of the operator in this thread: torch.compile, a mode, a transform, a tracer,
    the profiler, forward-mode differentiation."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() & _LISTENERS
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the dispatcher would hand these to the kernel as they are: no subclass, no lazy negation."""
    for tensor in tensors:  # noqa: SIM110 (a generator would cost a third of what this saves)
        if (type(tensor) is not _PLAIN and type(tensor) is not _PARAMETER) or tensor.is_neg():
            return False
    return True
