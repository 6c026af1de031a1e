"""Named arguments of a call as the operator takes them: lists in the order of declaration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentTypeError
from attngen.device.params import check_params, declared_params, input_names, named_arguments, number_names, without_seed
from attngen.spec.attention import AttentionSpec
from attngen.spec.dropout import RNG_STATE
from attngen.spec.expr import Type
from attngen.torch.dropout import generator_state

Lists = tuple[Any, ...]  # (inputs, ints, floats) without trailing empty lists; None for any other empty list


def unpacked(lists: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[int], Sequence[float]]:
    """(inputs, ints, floats), each a list or an empty tuple."""
    inputs, ints, floats = (*lists, None, None, None)[:3]
    return inputs or (), ints or (), floats or ()


class NamedArguments:
    """The inputs and params of one spec, without the spec: plain values, which torch.compile can follow."""

    def __init__(self, spec: AttentionSpec, unused: Sequence[str] = ()) -> None:
        """`unused`: other names that a call may give."""
        self.inputs = input_names(spec)
        self._input_names = set(self.inputs)
        self._drops = spec.dropout is not None
        self._unused = frozenset(unused)
        self._params = declared_params(spec)
        self.names = frozenset((*self.inputs, *self._params))
        self._ints, self._floats = (number_names(spec, kind) for kind in (Type.INT, Type.FLOAT))
        self._usual: Lists | None = None
        if all(default is not None for _, default in self._params.values()):
            self._usual = self._numbers(check_params(self._params, {}))

    def with_state(self, named: Mapping[str, object], device: Any) -> Mapping[str, object]:
        """The arguments of a call, with the state of the generator if there is dropout: by the call's `seed` and `offset`, or
        drawn by torch's generator. Raises ArgumentError."""
        if not self._unused.isdisjoint(named):
            named = {name: value for name, value in named.items() if name not in self._unused}
        if not self._drops or RNG_STATE.name in named:
            return named
        rest, given = without_seed(self.inputs, named)
        return {**rest, RNG_STATE.name: generator_state(device, *(given or ()))}

    def unchecked(
        self, named: Mapping[str, Any], captured: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], tuple[object, ...] | None]:
        """(inputs, params) for a `Front`; params is None if it cannot be part of a key."""
        if not named and not self.inputs:
            return [], ()
        if named.keys() == self._input_names:
            return [named[name] for name in self.inputs], ()
        params = tuple((name, type(value), value) for name, value in named.items() if name not in self._input_names)
        inputs: list[Any] = [named[name] if name in named else captured.get(name) for name in self.inputs]
        return inputs, params if all(kind in (int, float) for _, kind, _ in params) else None

    def lists(self, named: Mapping[str, object], captured: Mapping[str, Tensor]) -> Lists:
        """The operator's arguments after q, k, v and the spec's text; `captured` replaces inputs that are not in `named`.

        Raises ArgumentError for a name that is unknown, missing or out of range, ArgumentTypeError for what is no tensor.
        """
        if self._usual is not None:
            if not named and not self.inputs:
                return _trimmed(None, self._usual)
            if named.keys() == self._input_names:
                return _trimmed([tensor(name, named[name]) for name in self.inputs], self._usual)
        for name in self._floats:
            if isinstance(named.get(name), torch.Tensor):
                raise ArgumentTypeError(
                    f'param `{name}` is a tensor; expected a number. Declare it as `input {name}: fp32[]`; only mode="math" '
                    "takes tensors for params"
                )
        inputs, params = named_arguments(self.inputs, self._params, named, captured)
        tensors = [tensor(name, value) for name, value in zip(self.inputs, inputs, strict=True)]
        return _trimmed(tensors or None, self._numbers(params))

    def with_tensors(self, named: Mapping[str, Any], captured: Mapping[str, Tensor]) -> Lists:
        """`lists`, in which a float param may be a tensor without dimensions. Raises as `lists`."""
        given = {name: named[name] for name in self._floats if isinstance(named.get(name), torch.Tensor)}
        for name, value in given.items():
            if value.dim() or not value.is_floating_point():
                raise ArgumentTypeError(f"param `{name}` is a tensor {list(value.shape)} of {value.dtype}; expected one float")
        inputs, ints, floats = unpacked(self.lists({**named, **dict.fromkeys(given, 0.0)}, captured))
        return inputs, ints, [given.get(name, value) for name, value in zip(self._floats, floats, strict=True)]

    def _numbers(self, numbers: Mapping[str, int | float]) -> Lists:
        ints, floats = [int(numbers[n]) for n in self._ints], [float(numbers[n]) for n in self._floats]
        return (ints or None, floats) if floats else (ints,) if ints else ()


def _trimmed(inputs: list[Tensor] | None, numbers: Lists) -> Lists:
    """The lists without trailing empty ones: each costs a call half a microsecond."""
    return (inputs, *numbers) if numbers else () if inputs is None else (inputs,)


def tensor(name: str, value: object) -> Tensor:
    """`value` if it is a tensor of torch. Raises ArgumentTypeError."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"`{name}` is a {type(value).__name__}; expected a tensor, as `q` is")
    return value
