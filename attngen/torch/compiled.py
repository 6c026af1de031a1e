"""Compiled specs as callables of tensors, through the operator, so that torch can trace, export and replay their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.api import check_lse_given, check_stream, register_tensor_function
from attngen.device.arrays import view
from attngen.spec.attention import AttentionSpec
from attngen.torch.arguments import NamedArguments, tensor, unpacked
from attngen.torch.description import fixed_text
from attngen.torch.front import Call, Front
from attngen.torch.layout import check_tensors, follow_autocast
from attngen.torch.math import by_torch
from attngen.torch.observed import are_plain, is_observed
from attngen.torch.runtime import runtime


class TorchFunction:
    """`spec` as a function of tensors on `device`, by torch's name. `schedule` overrides the spec's own statement; `captures`
    are the values of inputs that a call does not give."""

    def __init__(self, spec: AttentionSpec, schedule: str | None, captures: Mapping[str, Any], device: str) -> None:
        self._device = torch.device(device)
        self._text = fixed_text(spec, schedule)
        self._arguments = NamedArguments(spec)
        self._captures = dict(captures)
        self._spec = spec
        self._dtype = getattr(torch, spec.dtype.torch)
        self._returns_lse = spec.lse
        self._front = Front()

    def takes(self, q: object) -> bool:
        """Whether `q` is a tensor on this device."""
        return isinstance(q, torch.Tensor) and q.device == self._device

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        named: Mapping[str, object],
        out: Tensor | None,
        lse: Tensor | None,
        stream: int | None,
    ) -> Tensor | tuple[Tensor, ...]:
        """O, or (O, lse), as `CompiledAttention` says. Raises ArgumentError."""
        k = tensor("k", k)
        v = tensor("v", self._spec.values_of(k, v))
        named = self._arguments.with_state(named, self._device)
        if out is not None or lse is not None or stream is not None:
            result = self._into((q, k, v), named, out, lse, stream)
        else:
            inputs, params = self._arguments.unchecked(named, self._captures)
            result = self._front.call((q, k, v, *inputs), params, self._described, q, k, v, named)
        return tuple(result) if self._returns_lse else result[0]

    def _described(self, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, object]) -> Call:
        check_tensors(q=q, k=k, v=v)
        return Call((*follow_autocast(q, k, v, self._dtype), self._text, *self._arguments.lists(named, self._captures)))

    def math(self, q: Tensor, k: Tensor, v: Tensor | None, named: Mapping[str, object]) -> Tensor | tuple[Tensor, ...]:
        """O, or (O, lse), by torch's own operations. Raises ArgumentError."""
        check_tensors(q=q, k=k)
        v = self._spec.values_of(k, v)
        check_tensors(v=v)
        named = self._arguments.with_state(named, q.device)
        result = by_torch(q, k, v, self._text, *self._arguments.with_tensors(named, self._captures))
        return result if self._returns_lse else result[0]

    def _into(
        self,
        tensors: tuple[Tensor, ...],
        named: Mapping[str, object],
        out: Tensor | None,
        lse: Tensor | None,
        stream: int | None,
    ) -> Sequence[Tensor]:
        """A call with `out`, `lse` or `stream`: it writes to its arguments, so it bypasses torch's dispatcher."""
        if lse is not None:
            check_lse_given(self._spec)
        check_stream(stream)
        inputs, ints, floats = unpacked(self._arguments.lists(named, self._captures))
        tensors = (*tensors, *inputs)
        outputs = {"out": out, "lse": lse} if self._returns_lse else {"out": out}
        given = [tensor(name, value) for name, value in outputs.items() if value is not None]
        if is_observed() or not are_plain(tensors) or not are_plain(given):
            names = ("q", "k", "v", *self._arguments.inputs, *(name for name, value in outputs.items() if value is not None))
            for name, value in zip(names, (*tensors, *given), strict=True):
                view(value, name)  # raises for a tensor without memory of its own
        return runtime(self._text, self._device)(tensors, ints, floats, tuple(outputs.values()), stream)


register_tensor_function(TorchFunction)
