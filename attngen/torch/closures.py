"""What a Python function closes over: a key by which its meaning is remembered, and the tensors and numbers that it reads.

Two functions with equal keys mean the same expression: the key has the code, and every value that the code can reach by its
name. Tensors are in it by their place, types and shapes, not by their elements, which are read at each call.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attngen.language.trace import codes_in

Tensor = Any
MAX_DEPTH = 40  # of values within values
FIXED = {*sys.stdlib_module_names, "attngen", "numpy", "torch"}  # packages whose classes and modules do not change
SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)  # of which objects have the values
PLAIN = (str, bytes, bool, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, enum.Enum)


_NAMES: dict[tuple[Any, ...], set[str]] = {}  # what the codes of some functions named when they were seen last


@dataclass
class Closure:
    """The values that some functions reach. `tensors` are distinct, each with the name under which it was found first;
    `numbers` are the integers found, by value, with their names. `opaque` is a value that the walk cannot look into: what was
    traced must not be remembered then."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    numbers: dict[int, str] = field(default_factory=dict)
    codes: set[types.CodeType] = field(default_factory=set)
    opaque: Any = None
    is_traced: bool = False  # by Dynamo: `tensors` are stand-ins
    symbols: set[int] = field(default_factory=set)  # positions of `tensors` that stand for integers of the caller
    _names: set[str] = field(default_factory=set)  # attributes and globals that the codes name
    _places: dict[int, int] = field(default_factory=dict)  # of tensors, by identity

    def key_of(self, *functions: Any) -> Hashable:
        """The key of `functions` together."""
        first = tuple(getattr(f, "__code__", type(f)) for f in functions)
        self._names |= _NAMES.get(first, set())
        while True:
            before = len(self._names)
            self.tensors.clear()
            self.numbers.clear()
            self._places.clear()
            self.opaque = None
            key = tuple(self._value("", f, {}, 0) for f in functions)
            if len(self._names) == before:  # attributes are looked for by the names of all codes
                _NAMES[first] = set(self._names)
                return key

    def place(self, tensor: Tensor) -> int | None:
        """The position of `tensor` in `tensors`."""
        return self._places.get(id(tensor))

    def _value(self, name: str, value: Any, above: Mapping[int, int], depth: int) -> Hashable:
        kind = type(value)
        if kind is types.FunctionType and id(value) not in above and depth <= MAX_DEPTH:
            return self._function(value, {**above, id(value): depth}, depth + 1)
        if isinstance(value, PLAIN):
            return kind, value
        if isinstance(value, slice):
            return kind, value.start, value.stop, value.step
        if kind is int or kind is float:
            if kind is int:
                self.numbers.setdefault(value, name)
            return kind, repr(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if id(value) in above:
            return "above", above[id(value)]
        if depth > MAX_DEPTH:
            self.opaque = value
            return "deep"
        above, depth = {**above, id(value): depth}, depth + 1
        if isinstance(value, types.MethodType):
            return "method", self._value(name, value.__func__, above, depth), self._value(name, value.__self__, above, depth)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, dict(value.keywords))
            return "partial", *(self._value(name, part, above, depth) for part in parts)
        if isinstance(value, (list, tuple, set, frozenset, torch.Size)):
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return kind, *(self._value(name, item, above, depth) for item in items)
        if isinstance(value, dict):
            return dict, *((repr(k), self._value(str(k), item, above, depth)) for k, item in value.items())
        if isinstance(value, (types.ModuleType, type)):
            return "itself", value, *self._space(value, above, depth)
        if isinstance(value, types.BuiltinFunctionType) or kind.__module__.startswith("torch._ops"):
            return "itself", value
        return self._object(name, value, above, depth)

    def add(self, name: str, tensor: Tensor) -> int:
        """The position of `tensor`, which is added if it is new."""
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append((name, tensor))
        return place

    def _tensor(self, name: str, tensor: Tensor) -> Hashable:
        place = self.add(name, tensor)
        return "tensor", place, tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.requires_grad

    def _function(self, function: types.FunctionType, above: Mapping[int, int], depth: int) -> Hashable:
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            return self._value("", original, above, depth)
        self._code(function.__code__)
        found: list[Hashable] = [function.__code__]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found.append(self._value(name, cell.cell_contents, above, depth))
            except ValueError:  # not assigned yet
                found.append("empty")
        names = function.__code__.co_varnames
        found += [
            self._value(name, v, above, depth)
            for name, v in zip(names[::-1], (function.__defaults__ or ())[::-1], strict=False)
        ]
        found += [(n, self._value(n, v, above, depth)) for n, v in (function.__kwdefaults__ or {}).items()]
        if (function.__module__ or "").startswith("torch."):
            return tuple(found)  # what torch's own functions name does not change
        space = function.__globals__
        found += [(n, self._value(n, space[n], above, depth)) for n in names_in_code(function.__code__) if n in space]
        return tuple(found)

    def _code(self, code: types.CodeType) -> None:
        if code not in self.codes:
            self.codes.update(codes_in(code))
            self._names.update(names_in_code(code))

    def _object(self, name: str, value: Any, above: Mapping[int, int], depth: int) -> Hashable:
        """An object by those of its attributes and methods that some code names, and its `__call__`."""
        kind = type(value)
        members = members_of(kind)
        own = dict(getattr(value, "__dict__", {}))
        for slot in (s for space in kind.__mro__ for s in getattr(space, "__slots__", ())):
            own.setdefault(slot, getattr(value, slot, None))
        if not own and "__call__" not in members and not isinstance(value, torch.nn.Module):
            self.opaque = value
            return "opaque"
        for space in ("_parameters", "_buffers", "_modules"):  # torch.nn.Module
            own.update(own.pop(space, None) or {})
        wanted = self._names | {"__call__", "forward"}
        found: list[Any] = [kind]
        found += self._members({**members, **own}, wanted, above, depth)
        return tuple(found)

    def _space(self, value: types.ModuleType | type, above: Mapping[int, int], depth: int) -> list[Hashable]:
        """What a module or a class has by names of some code, if it may change."""
        home, members = (value.__module__, members_of(value)) if isinstance(value, type) else (value.__name__, vars(value))
        return [] if home.partition(".")[0] in FIXED else self._members(members, self._names, above, depth)

    def _members(self, members: Mapping[str, Any], wanted: set[str], above: Mapping[int, int], depth: int) -> list[Hashable]:
        found: list[Hashable] = []
        for name, member in sorted_items(members, wanted):
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            if isinstance(member, types.FunctionType) and member.__module__.startswith("torch."):
                continue
            if not isinstance(member, SLOTS):
                found.append((name, self._value(name, member, above, depth)))
        return found


def members_of(kind: type) -> dict[str, Any]:
    """What a class and its bases have."""
    return {k: v for space in reversed(kind.__mro__[:-1]) for k, v in vars(space).items()}


def sorted_items(space: Mapping[str, Any], wanted: set[str]) -> list[tuple[str, Any]]:
    return sorted(((n, space[n]) for n in wanted if n in space), key=lambda item: item[0])


@functools.cache
def names_in_code(code: types.CodeType) -> tuple[str, ...]:
    """The globals and attributes that `code` and the code inside it name."""
    return tuple(sorted({name for one in codes_in(code) for name in one.co_names}))
