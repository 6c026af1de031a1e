"""Compiled specs, called with tensors: by the same operator, so that they too are traced, exported and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.api import register_of_tensors
from attngen.spec.attention import AttentionSpec
from attngen.torch.arguments import NamedArguments, tensor
from attngen.torch.description import fixed_text
from attngen.torch.operator import attention_operator

Tensor = Any


class OfTensors:
    """`spec` as a function of tensors on `device`, as torch names it. `rung` overrides the spec's own statement, `captures`
    stand for inputs left out."""

    def __init__(self, spec: AttentionSpec, rung: str | None, captures: Mapping[str, Any], device: str) -> None:
        self._device = torch.device(device)
        self._text = fixed_text(spec, rung)
        self._arguments = NamedArguments(spec)
        self._captures = dict(captures)
        self._lse = spec.lse

    def takes(self, q: Any) -> bool:
        """Whether this is for arguments like `q`."""
        return isinstance(q, torch.Tensor) and q.device == self._device

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any]) -> Any:
        """O, or (O, lse). Raises ArgumentError."""
        k, v = tensor("k", k), tensor("v", v)
        output, lse = attention_operator(q, k, v, self._text, *self._arguments.lists(named, self._captures))
        return (output, lse) if self._lse else output


register_of_tensors(OfTensors)
