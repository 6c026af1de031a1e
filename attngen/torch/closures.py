"""What a Python function closes over: a key by which its meaning is remembered, and the tensors and numbers that it reads.

Two functions with equal keys mean the same expression: the key has the code, and every value that the code can reach by its
name, in closures, globals, attributes of objects, classes and modules, lists and dicts. Tensors are in it by their place, types
and shapes, not by their elements, which are read at each call. What the walk cannot look into is `opaque`: such a function is
traced in each call.
"""

from __future__ import annotations

import dis
import enum
import functools
import operator
import sys
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngen.language.trace import codes_in
from attngen.torch.private import before_dynamo

MAX_DEPTH = 40  # levels of values within values
FIXED = {*sys.stdlib_module_names, "attngen", "numpy", "torch"}  # packages whose classes and modules do not change
MADE_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)  # methods
FIXED_MEMBERS = (  # members of classes: methods that do not change, and places whose values objects have
    *MADE_IN_C,
    types.ClassMethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    type(vars(namedtuple("_Pair", "one"))["one"]),
)
CHANGING = {"datetime", "os", "random", "secrets", "time", "uuid"}  # packages of FIXED whose functions return what changes
BY_OTHER_NAMES = {  # what reads a value whose name is in no code
    "__dict__", "__getattribute__", "__globals__", "__import__", "are_deterministic_algorithms_enabled", "attrgetter",
    "backends", "dir", "environ", "eval", "exec", "get_default_dtype", "get_float32_matmul_precision", "get_num_threads",
    "getattr", "getenv", "globals", "hasattr", "import_module", "locals", "methodcaller", "modules", "random", "vars",
}  # fmt: skip
IMPLICIT = {  # methods that Python calls without their name
    *(n for n in vars(operator) if n.startswith("__")),
    *(f"__r{n[2:]}" for n in vars(operator) if n.startswith("__")),
    "__array__", "__bool__", "__ceil__", "__complex__", "__divmod__", "__enter__", "__exit__", "__float__", "__floor__",
    "__format__", "__get__", "__getattr__", "__getattribute__", "__hash__", "__int__", "__iter__", "__len__", "__missing__",
    "__next__", "__rdivmod__", "__repr__", "__reversed__", "__round__", "__str__", "__trunc__",
}  # fmt: skip
OF_CLASSES = {"__class_getitem__", "__init__", "__instancecheck__", "__new__", "__post_init__"}  # Python calls them for a class
HOOKS = {"forward", "_forward_hooks", "_forward_pre_hooks"}  # called by torch.nn.Module and torch.autograd.Function
CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, deque, torch.Size)  # their items are all that they have
PLAIN = (str, bytes, bool, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)


_NAMES: dict[tuple[object, ...], set[str]] = {}  # what the codes of some functions named when they were seen last


@dataclass
class Closure:
    """The values that some functions reach. `tensors` are distinct, each with the name under which it was found first;
    `numbers` and `floats` are the numbers found, by value, with their names. `opaque` is a value that the walk cannot look
    into: what was traced must not be remembered then."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    numbers: dict[int, str] = field(default_factory=dict)
    floats: dict[float, str] = field(default_factory=dict)
    codes: set[types.CodeType] = field(default_factory=set)
    opaque: object = None
    is_traced: bool = False  # by Dynamo: `tensors` are stand-ins
    symbols: set[int] = field(default_factory=set)  # positions of `tensors` that stand for integers of the caller
    stands: dict[int, Tensor] = field(default_factory=dict)  # for `tensors` of a transform, by identity
    shapes: dict[int, tuple[int | torch.SymInt, ...]] = field(
        default_factory=dict
    )  # by position in `tensors`, as Dynamo has them
    _names: set[str] = field(default_factory=set)  # attributes and globals that the codes name
    _places: dict[int, int] = field(default_factory=dict)  # positions in `tensors`, by the tensor's identity
    _seen: dict[int, tuple[int, object]] = field(default_factory=dict)  # what was looked into, by identity, with its number

    def key_of(self, *functions: object) -> Hashable:
        """The key of `functions` together."""
        first = tuple(getattr(f, "__code__", type(f)) for f in functions)
        self._names |= _NAMES.get(first, set())
        while True:
            before = len(self._names)
            self.tensors.clear()
            self.numbers.clear()
            self.floats.clear()
            self._places.clear()
            self._seen.clear()
            self.opaque = None
            key = tuple(self._value("", f, 0) for f in functions)
            if len(self._names) == before:  # attributes are looked for by the names of all codes
                _NAMES[first] = set(self._names)
                return key

    def stand_for(self, tensor: Tensor, stand: Tensor) -> None:
        """Has `stand` in the place of `tensor`, one of `tensors`, in what is traced."""
        self.stands[id(tensor)] = stand
        self._places[id(stand)] = self._places[id(tensor)]

    def place(self, tensor: Tensor) -> int | None:
        """The position of `tensor` in `tensors`."""
        return self._places.get(id(tensor))

    def _value(self, name: str, value: Any, depth: int) -> Hashable:
        kind = type(value)
        if isinstance(value, PLAIN):
            return kind, value
        if isinstance(value, (slice, range)):
            return kind, value.start, value.stop, value.step
        if kind is int or kind is float:
            (self.numbers if kind is int else self.floats).setdefault(value, name)
            return kind, repr(value)
        if isinstance(value, np.generic):
            if isinstance(value, np.integer):
                self.numbers.setdefault(int(value), name)
            elif isinstance(value, np.floating):
                self.floats.setdefault(float(value), name)
            return kind, value.tobytes()
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        if depth > MAX_DEPTH:
            self.opaque = value
            return "deep"
        self._seen[id(value)] = len(self._seen), value
        return self._looked_into(name, value, depth + 1)

    def _looked_into(self, name: str, value: Any, depth: int) -> Hashable:
        """The key of what has values in it."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, depth)
        if isinstance(value, enum.Enum):
            return value, *self._enumerated(value, depth)
        if isinstance(value, types.MethodType):
            return "method", self._value(name, value.__func__, depth), self._value(name, value.__self__, depth)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, dict(value.keywords))
            return "partial", *(self._value(name, part, depth) for part in parts)
        if isinstance(value, (list, tuple, set, frozenset, deque, torch.Size)):
            items: Iterable[object] = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            found = kind, *(self._value(name, item, depth) for item in items)
            return found if kind in CONTAINERS else (*found, self._object(value, depth))
        if isinstance(value, dict):
            keys = (repr(k) if type(k).__module__ == "builtins" else self._value("", k, depth) for k in value)
            items = (self._value(str(k), item, depth) for k, item in value.items())
            found = kind, *zip(keys, items, strict=True)
            return found if kind in CONTAINERS else (*found, self._object(value, depth))
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, (types.ModuleType, type(None))):
            return "builtin method", value.__name__, self._value(name, value.__self__, depth)
        if isinstance(value, (types.ModuleType, type)):
            return "itself", value, *self._space(value, depth)
        if isinstance(value, (types.BuiltinFunctionType, np.ufunc)) or kind.__module__.startswith("torch._ops"):
            if getattr(value, "__module__", None) in CHANGING:
                self.opaque = value
            return "itself", value
        return self._object(value, depth)

    def add(self, name: str, tensor: Tensor) -> int:
        """The position of `tensor`, which is added if it is new."""
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append((name, tensor))
        return place

    def _tensor(self, name: str, tensor: Tensor) -> Hashable:
        place = self.add(name, tensor)
        own = self._members(vars(tensor), self._names, 1)
        return "tensor", place, tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type, tensor.requires_grad, *own

    def _function(self, function: types.FunctionType, depth: int) -> Hashable:
        original = before_dynamo(function)
        if original is not None:
            return self._value("", original, depth)
        code = function.__code__
        self._code(code)
        found: list[Hashable] = [code]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                found.append(self._value(name, cell.cell_contents, depth))
            except ValueError:  # not assigned yet
                found.append("empty")
        names = code.co_varnames
        found += [self._value(n, v, depth) for n, v in zip(names[::-1], (function.__defaults__ or ())[::-1], strict=False)]
        found += [(n, self._value(n, v, depth)) for n, v in (function.__kwdefaults__ or {}).items()]
        if (function.__module__ or "").startswith("torch."):
            return tuple(found)  # what torch's own functions name does not change
        if not BY_OTHER_NAMES.isdisjoint(names_in_code(code)):
            self.opaque = function
        scope = function.__globals__
        found += [(n, self._value(n, scope[n], depth)) for n in globals_in(code) if n in scope]
        for n in imports_in(code, scope.get("__package__") or ""):
            if n in sys.modules:
                found.append((n, self._value(n, sys.modules[n], depth)))
        return (*found, *self._members(vars(function), self._names, depth))

    def _code(self, code: types.CodeType) -> None:
        if code not in self.codes:
            self.codes.update(codes_in(code))
            self._names.update(names_in_code(code))

    def _object(self, value: object, depth: int) -> Hashable:
        """An object by those of its attributes and methods that some code names, or that Python calls without their name."""
        kind = type(value)
        members = members_of(kind)
        own = dict(getattr(value, "__dict__", {}))
        for slot in (s for space in kind.__mro__ for s in getattr(space, "__slots__", ())):
            own.setdefault(slot, getattr(value, slot, None))
        is_empty = not (own or hasattr(value, "__dict__") or type(members.get("__call__")) is types.FunctionType)
        if (is_empty and not isinstance(value, (torch.nn.Module, *CONTAINERS))) or has_state_of_c(kind):  # type: ignore[arg-type]
            self.opaque = value
            return "opaque"
        for space in ("_parameters", "_buffers", "_modules"):  # torch.nn.Module
            own.update(own.pop(space, None) or {})
        wanted = self._names | HOOKS | functions_of(members, IMPLICIT)
        if any(space.__module__.startswith("torch.") for space in kind.__mro__ if space is not torch.nn.Module):
            wanted |= {n for n in own if not n.startswith("_")}  # what torch's own functions name is not looked for
        of_python = {space for space in kind.__mro__ if package_of(space) in sys.stdlib_module_names}
        if any(functions_of(vars(space), IMPLICIT) for space in of_python - {object}):
            wanted |= own.keys()  # nor what Python's own do, as those of argparse.Namespace
        found = self._members(own, wanted, depth)
        for base in kind.__mro__[:-1]:  # `super` reaches the members of each
            found += self._members(vars(base), self._names if base in of_python else wanted, depth)
        return kind, *found

    def _enumerated(self, value: enum.Enum, depth: int) -> list[Hashable]:
        """What a member of an enumeration has that may change: its number or text does not."""
        own = {n: member for n, member in vars(value).items() if not n.startswith("_")}
        if not isinstance(value.value, (*PLAIN, int, float)):
            own["value"] = value.value
        found = self._members(own, self._names | {"value"}, depth)
        return found + self._classes(type(value), self._names, IMPLICIT, depth)

    def _space(self, value: types.ModuleType | type, depth: int) -> list[Hashable]:
        """What a module or a class has by names of some code, if it may change."""
        home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        package = home.partition(".")[0]
        if package in CHANGING:
            self.opaque = value
        if package in FIXED:
            return []
        if isinstance(value, types.ModuleType):
            return self._members(vars(value), self._names, depth)
        kinds = (value,) if type(value) is type else (value, type(value))
        return [member for kind in kinds for member in self._classes(kind, self._names | HOOKS, IMPLICIT | OF_CLASSES, depth)]

    def _classes(self, kind: type, wanted: set[str], implicit: set[str], depth: int) -> list[Hashable]:
        """What `kind` and the classes that it is derived from have by names of some code, and those of `implicit` that may
        change."""
        found: list[Hashable] = []
        for space in map(vars, kind.__mro__[:-1]):
            own = {n for n in functions_of(space, implicit) if package_of(space[n]) not in FIXED}
            found += self._members(space, wanted | own, depth)
        return found

    def _members(self, members: Mapping[str, object], wanted: set[str], depth: int) -> list[Hashable]:
        found: list[Hashable] = []
        for name in sorted(wanted & members.keys()) if members else ():
            member = members[name]
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, functools.cached_property):
                member = member.func
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            if isinstance(member, types.FunctionType) and (member.__module__ or "").startswith("torch."):
                continue
            if not isinstance(member, FIXED_MEMBERS):
                found.append((name, self._value(name, member, depth)))
        return found


@functools.cache
def has_state_of_c(kind: type) -> bool:
    """Whether objects of `kind` may hold what no attribute shows: a class that it is derived from is written in C."""
    spaces = (space for space in kind.__mro__ if space not in (object, types.SimpleNamespace, *CONTAINERS))
    return any(isinstance(m, MADE_IN_C) and m.__objclass__ is space for space in spaces for m in vars(space).values())


def members_of(kind: type) -> dict[str, object]:
    """What a class and its bases have."""
    return {k: v for space in reversed(kind.__mro__[:-1]) for k, v in vars(space).items()}


def functions_of(members: Mapping[str, object], names: set[str]) -> set[str]:
    """Those of `names` that are functions of Python among `members`."""
    return {n for n in names & members.keys() if type(members[n]) in (types.FunctionType, classmethod, staticmethod)}


def package_of(function: object) -> str:
    """The package of a function of Python, or of one that a classmethod or staticmethod has."""
    module: str = getattr(function, "__func__", function).__module__ or ""
    return module.partition(".")[0]


@functools.cache
def imports_in(code: types.CodeType, package: str) -> tuple[str, ...]:
    """The modules that `code` and the code inside it may import: by their own names, or within `package` and its parents."""
    parts = package.split(".")
    homes = ("", *(".".join(parts[: n + 1]) + "." for n in range(len(parts))))
    steps = (step for one in codes_in(code) for step in dis.get_instructions(one))
    found = {str(step.argval) for step in steps if step.opname in ("IMPORT_NAME", "IMPORT_FROM")}
    return tuple(sorted(home + n for home in homes for n in found))


@functools.cache
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that `code` and the code inside it look for among globals."""
    steps = (step for one in codes_in(code) for step in dis.get_instructions(one))
    return tuple(sorted({str(step.argval) for step in steps if step.opname.endswith(("_GLOBAL", "_NAME", "_GLOBALS"))}))


@functools.cache
def names_in_code(code: types.CodeType) -> tuple[str, ...]:
    """The globals and attributes that `code` and the code inside it name."""
    return tuple(sorted({name for one in codes_in(code) for name in one.co_names}))
