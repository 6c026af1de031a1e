"""Whether torch's dispatcher may be skipped: nothing but the kernel would see a call of the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.torch.private import USUAL_KEYS, forward_ad, function_modes, included_keys, profiles

_LISTENERS = ~USUAL_KEYS
_is_compiling = torch.compiler.is_dynamo_compiling  # others that trace have a mode
_PLAIN, _PARAMETER = torch.Tensor, torch.nn.Parameter


def is_observed() -> bool:
    """Whether something of torch would see a call of the operator in this thread: torch.compile, a mode, a transform, a tracer,
    the profiler, forward-mode differentiation."""
    observed: bool = (  # truth values all: a call of bool() would cost as much as one of these
        _is_compiling()
        or included_keys().raw_repr() & _LISTENERS != 0
        or function_modes() != 0
        or profiles()
        or forward_ad._current_level >= 0
    )
    return observed


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the dispatcher would hand these to the kernel as they are: no subclass, no lazy negation."""
    for tensor in tensors:  # noqa: SIM110 (a generator would cost a third of what this saves)
        if (type(tensor) is not _PLAIN and type(tensor) is not _PARAMETER) or tensor.is_neg():
            return False
    return True
