"""Compiled specs as callables of tensors, through the operator, so that torch can trace, export and replay their calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.api import check_stream, register_of_tensors
from attngen.device.arrays import ArgumentError, view
from attngen.spec.attention import AttentionSpec
from attngen.torch.arguments import NamedArguments, tensor
from attngen.torch.description import fixed_text
from attngen.torch.eager import EagerCalls
from attngen.torch.layout import refuse_sparse
from attngen.torch.observed import are_plain, is_observed
from attngen.torch.runtime import runtime

Tensor = Any


class OfTensors:
    """`spec` as a function of tensors on `device`, by torch's name. `rung` overrides the spec's own statement; `captures` are
    the values of inputs that a call does not give."""

    def __init__(self, spec: AttentionSpec, rung: str | None, captures: Mapping[str, Any], device: str) -> None:
        self._device = torch.device(device)
        self._text = fixed_text(spec, rung)
        self._arguments = NamedArguments(spec)
        self._captures = dict(captures)
        self._lse = spec.lse
        self._calls = EagerCalls()

    def takes(self, q: Any) -> bool:
        """Whether `q` is a tensor on this device."""
        return isinstance(q, torch.Tensor) and q.device == self._device

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        named: Mapping[str, Any],
        out: Tensor | None,
        lse: Tensor | None,
        stream: int | None,
    ) -> Any:
        """O, or (O, lse), as `CompiledAttention` says. Raises ArgumentError."""
        k, v = tensor("k", k), tensor("v", v)
        if out is not None or lse is not None or stream is not None:
            return self._into(q, k, v, named, out, lse, stream)
        inputs, said = self._arguments.said(named, self._captures)
        result = self._calls.repeat(q, k, v, inputs, said)
        if result is None:
            refuse_sparse(q, k, v)
            arguments = (q, k, v, self._text, *self._arguments.lists(named, self._captures))
            result = self._calls.make(q, k, v, inputs, said, arguments)
        return result if self._lse else result[0]

    def _into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        named: Mapping[str, Any],
        out: Tensor | None,
        lse: Tensor | None,
        stream: int | None,
    ) -> Any:
        """A call with `out`, `lse` or `stream`: it writes to its arguments, so it bypasses torch's dispatcher."""
        if lse is not None and not self._lse:
            raise ArgumentError("`lse` was given, but the spec does not say `output lse`")
        check_stream(stream)
        inputs, ints, floats = [*self._arguments.lists(named, self._captures), None, None, None][:3]
        out = None if out is None else tensor("out", out)
        lse = None if lse is None else tensor("lse", lse)
        named_tensors = {"q": q, "k": k, "v": v, **dict(zip(self._arguments.inputs, inputs or (), strict=True))}
        named_tensors |= {name: given for name, given in (("out", out), ("lse", lse)) if given is not None}
        if is_observed() or not are_plain(tuple(named_tensors.values())):
            for name, given in named_tensors.items():
                view(given, name)  # raises for a tensor without memory of its own
        result = runtime(self._text, q.device)(q, k, v, inputs or (), ints or (), floats or (), out, lse, stream)
        return result if self._lse else result[0]


register_of_tensors(OfTensors)
