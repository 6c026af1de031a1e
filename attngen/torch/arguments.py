"""Named arguments of a call as the operator takes them: lists in the order of declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.device.binding import check_params, refuse_unknown
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type

Tensor = Any
Lists = tuple[Any, ...]  # (inputs, ints, floats) without trailing empty lists; None for any other empty list


class NamedArguments:
    """The inputs and params of one spec, without the spec: plain values, which torch.compile can follow."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.inputs = tuple(i.name for i in spec.inputs)
        self._input_names = set(self.inputs)
        self._params = {p.name: (str(p.type), p.default) for p in spec.params}
        self._ints = tuple(p.name for p in spec.params if p.type is Type.INT)
        self._floats = tuple(p.name for p in spec.params if p.type is Type.FLOAT)
        self._usual: Lists | None = None
        if all(p.default is not None for p in spec.params):
            self._usual = self._numbers({})

    def said(self, named: Mapping[str, Any], captured: Mapping[str, Tensor]) -> tuple[list[Tensor], tuple[Any, ...] | None]:
        """(inputs, params) as part of the key of `EagerCalls`, unchecked; params is None if it cannot be part of a key."""
        if named.keys() == self._input_names:
            return [named[name] for name in self.inputs], ()
        params = tuple((name, type(value), value) for name, value in named.items() if name not in self._input_names)
        inputs = [named[name] if name in named else captured.get(name) for name in self.inputs]
        return inputs, params if all(kind in (int, float) for _, kind, _ in params) else None

    def lists(self, named: Mapping[str, Any], captured: Mapping[str, Tensor]) -> Lists:
        """The operator's arguments after q, k, v and the spec's text; `captured` replaces inputs that are not in `named`.

        Raises ArgumentError for a name that is unknown, missing or out of range, ArgumentTypeError for what is no tensor.
        """
        if self._usual is not None:
            if not named and not self.inputs:
                return _trimmed(None, self._usual)
            if named.keys() == self._input_names:
                return _trimmed([tensor(name, named[name]) for name in self.inputs], self._usual)
        refuse_unknown(list(named), [*self.inputs, *self._params])
        inputs = []
        for name in self.inputs:
            if name not in named and name not in captured:
                raise ArgumentError(f"input `{name}` was not given; pass {name}=...")
            inputs.append(tensor(name, named[name] if name in named else captured[name]))
        return _trimmed(inputs or None, self._numbers(named))

    def _numbers(self, named: Mapping[str, Any]) -> Lists:
        numbers = check_params(self._params, named)
        ints, floats = [int(numbers[n]) for n in self._ints], [float(numbers[n]) for n in self._floats]
        return (ints or None, floats) if floats else (ints,) if ints else ()


def _trimmed(inputs: list[Tensor] | None, numbers: Lists) -> Lists:
    """The lists without trailing empty ones: each costs a call half a microsecond."""
    return (inputs, *numbers) if numbers else () if inputs is None else (inputs,)


def tensor(name: str, value: Any) -> Tensor:
    """`value` if it is a tensor of torch. Raises ArgumentTypeError."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"`{name}` is a {type(value).__name__}; expected a tensor, as `q` is")
    return value
