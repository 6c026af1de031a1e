"""Plain Python functions as expressions: a mask or score is called once with tracers, and returns its `Expr`."""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from attngen.diagnostics import DiagnosticError, counted, excerpt
from attngen.language.captured import CapturedArray, array_dtype
from attngen.language.tracer import TraceError, Tracer, call, is_array, lift, tracing_builtins
from attngen.source import SourceFile, Span
from attngen.spec.expr import Expr

# The meaning of a function's parameters without default, by their number.
SIGNATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "mask": (("b", "h", "q", "k"),),
    "score": (("s", "b", "h", "q", "k"), ("b", "h", "q", "k")),
    "sink": (("b", "h", "q", "k"),),
    "k_scale": (("b", "h", "q", "k"), ("b", "h", "k")),
    "v_scale": (("b", "h", "q", "k"), ("b", "h", "k")),
    "scale": (),
    "dropout": (),
}
# Parameter names with a fixed meaning, also FlexAttention's.
MEANT = {"s": "s", "score": "s", "b": "b", "h": "h", "q": "q", "k": "k", "q_idx": "q", "kv_idx": "k"}


def trace(
    function: Callable[..., object],
    keyword: str,
    arguments: Mapping[str, Expr],
    known: Mapping[str, object],
    sizes: Mapping[str, object],
    captures: dict[str, CapturedArray],
) -> Expr:
    """The expression that `function` returns for `arguments`, which are `s`, `b`, `h`, `q` and `k`.

    `function` is a Python function, a bound method, a functools.partial, or an object whose `__call__` is a Python function.
    Parameters with a default keep it; those without are (b, h, q, k), or (s, b, h, q, k) for a score. Arrays in defaults,
    closure and globals, in attributes of objects, and in lists, tuples and dicts of these become CapturedArrays. Those that are
    read are added to `captures`: `tables[1]` as `tables_1`, `tables["bias"]` and `config.bias` as `bias`. A name in `known`
    (the declared inputs and params) replaces a variable of that name; a name in `sizes` does not. Raises TraceError, and
    DiagnosticError for the name of a captured array that cannot be used.
    """
    environment = _Environment(known, sizes, captures)
    prepared = environment.prepared(function)
    title = title_of(function)
    values = [Tracer(arguments[name]) for name in _parameters(function, keyword, title)]
    try:
        return _returned(prepared(*values), title)
    except DiagnosticError:
        raise
    except RecursionError as error:
        raise TraceError(f"{title} calls itself endlessly, or builds an expression that is nested too deeply") from error
    except TraceError as error:
        raise TraceError(f"{error}{place_of(error, environment.codes)}") from error
    except Exception as error:
        said = f"{title} raised {type(error).__name__} when it was traced: {error}"
        raise TraceError(f"{said}{place_of(error, environment.codes)}") from error


def _returned(value: object, title: str) -> Expr:
    if value is None:
        raise TraceError(f"{title} returned None: is a `return` missing?")
    if isinstance(value, CapturedArray):
        value.refuse()
    return lift(value)


def title_of(function: object) -> str:
    name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", None)
    return f"`{name or type(function).__name__}`"


def _parameters(function: Callable[..., object], keyword: str, title: str) -> tuple[str, ...]:
    """The meaning of the parameters of `function` without default, in order. Raises TraceError."""
    known = SIGNATURES[keyword]
    expected = " or ".join(f"({', '.join(names)})" for names in known)
    wanted = f"a {keyword} takes {expected}" if known else f"the {keyword} is a number or text, no function"
    own: list[str] = []
    by_keyword: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default is not parameter.empty:
            continue
        (by_keyword if parameter.kind is parameter.KEYWORD_ONLY else own).append(parameter.name)
    if by_keyword:
        needs = ", ".join(f"`{name}`" for name in by_keyword)
        raise TraceError(f"{title} requires {needs} by keyword; {wanted}, and every other parameter needs a default")
    found = next((names for names in known if len(names) == len(own)), None)
    if found is None:
        raise TraceError(
            f"{title} takes {counted(len(own), 'argument')} without a default ({', '.join(own) or 'none'}); {wanted}. Give the "
            "others a default, as in n=8"
        )
    for position, (name, meaning) in enumerate(zip(own, found, strict=True)):
        if MEANT.get(name, meaning) != meaning:
            raise TraceError(f"argument {position + 1} of {title} is called `{name}` but is `{meaning}`: {wanted}")
    return found


NOT_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
MEMBERS = {"_parameters", "_buffers", "_modules"}  # where torch.nn.Module has attributes that are tensors or modules


@dataclass
class _Environment:
    """The variables of a traced function, with arrays replaced by CapturedArrays."""

    known: Mapping[str, object]
    sizes: Mapping[str, object]
    captures: dict[str, CapturedArray]
    functions: dict[types.FunctionType, types.FunctionType] = field(default_factory=dict)
    codes: set[types.CodeType] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # in the code: of globals, attributes and methods, and text for getattr
    open: set[int] = field(default_factory=set)  # identities of objects that are looked into at the moment

    def prepared(self, function: object) -> Callable[..., object]:
        """`function` in this environment, as are the functions of its module that it calls."""
        if isinstance(function, functools.partial):
            names = list(inspect.signature(function.func).parameters)
            args = [self.captured(names[i] if i < len(names) else "array", a) for i, a in enumerate(function.args)]
            keywords = {name: self.captured(name, value) for name, value in function.keywords.items()}
            return functools.partial(self.prepared(function.func), *args, **keywords)
        if isinstance(function, types.MethodType):
            return types.MethodType(self.prepared(function.__func__), self._object(function.__self__))
        if isinstance(function, types.FunctionType):
            return self._function(function)
        of_class = None if isinstance(function, type) else getattr(type(function), "__call__", None)  # noqa: B004
        if isinstance(of_class, types.FunctionType):
            return types.MethodType(self._function(of_class), self._object(function))
        raise TraceError(f"expected a plain Python function, not a {type(function).__name__}")

    def captured(self, name: str, value: Any) -> Any:
        """`value`, or its stand-in if it is an array, or has arrays: a list, tuple, dict or object."""
        if type(value) is dict:
            members = {key: self.captured(key if isinstance(key, str) else f"{name}_{key}", one) for key, one in value.items()}
            return members if any(members[key] is not one for key, one in value.items()) else value
        if type(value) in (list, tuple):
            items = [self.captured(f"{name}_{i}", one) for i, one in enumerate(value)]
            return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if not is_array(value):
            return self._object(value)
        captured = CapturedArray(name, value, array_dtype(value), captures=self.captures)
        return captured if captured.shape or captured.dtype_name is None else captured.element()

    def _object(self, owner: object) -> object:
        """An object that traced code reads, or a copy of it with the stand-ins of arrays among the attributes that the code, or
        a method or property of the object that it names, names in turn."""
        if isinstance(owner, NOT_LOOKED_INTO) or not hasattr(owner, "__dict__") or id(owner) in self.open:
            return owner
        attributes: dict[str, Any] = {}
        for of in (*reversed(type(owner).__mro__), owner):  # attributes of a class are its objects' too
            attributes |= vars(of)
        wanted = self.names | {"__call__"}
        while more := {n for name in wanted & attributes.keys() for n in names_in(attributes[name])} - wanted:
            wanted |= more
        self.open.add(id(owner))
        replaced = self._stand_ins({name: value for name, value in attributes.items() if name in wanted})
        for space in MEMBERS & attributes.keys():
            members = attributes[space]
            found = self._stand_ins({name: value for name, value in members.items() if name in wanted})
            if found:
                replaced[space] = {**members, **found}
        self.open.remove(id(owner))
        try:
            made = copy.copy(owner) if replaced else owner
        except Exception:  # raised by the object's class: an array that is read is refused by its place in the code
            return owner
        made.__dict__.update(replaced)
        return made

    def _stand_ins(self, attributes: Mapping[str, object]) -> dict[str, object]:
        """Those of `attributes` that are arrays or have some."""
        made = {name: self.captured(name.lstrip("_"), value) for name, value in attributes.items()}
        return {name: stand_in for name, stand_in in made.items() if stand_in is not attributes[name]}

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if function in self.functions:
            return self.functions[function]
        code = function.__code__
        self.codes.update(codes_in(code))
        used = {name for inner in codes_in(code) for name in inner.co_names}
        self.names |= names_in(function)
        scope: dict[str, object] = {n: v for n, v in {**self.sizes, **self.known}.items() if n in used}
        scope["__builtins__"] = tracing_builtins()
        cells = tuple(types.CellType() for _ in code.co_freevars)
        made = types.FunctionType(code, scope, function.__name__, None, cells)
        self.functions[function] = made
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        made.__defaults__ = tuple(self.captured(n, v) for n, v in zip(names, defaults, strict=True))
        made.__kwdefaults__ = {n: self.captured(n, v) for n, v in (function.__kwdefaults__ or {}).items()}
        scope |= {
            n: self._replaced(function, n, v) for n, v in function.__globals__.items() if n in used and n != "__builtins__"
        }
        for name, cell, original in zip(code.co_freevars, cells, function.__closure__ or (), strict=True):
            try:
                value = original.cell_contents
            except ValueError:  # not assigned yet
                continue
            cell.cell_contents = self._replaced(function, name, value)
        return made

    def _replaced(self, function: types.FunctionType, name: str, value: object) -> object:
        """The value of a global or enclosing variable of `function` in the traced function."""
        if name in self.known:
            return self.known[name]
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            return self._function(value)
        return self.captured(name, value)


def names_in(member: object) -> set[str]:
    """The names and texts in the code of a function, a property, or a method of a class."""
    if isinstance(member, property):
        member = member.fget
    code = getattr(getattr(member, "__func__", member), "__code__", None)
    if not isinstance(code, types.CodeType):
        return set()
    found = {name for one in codes_in(code) for name in one.co_names}
    return found | {text for one in codes_in(code) for text in one.co_consts if isinstance(text, str)}


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code`, and the code of functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def place_of(error: BaseException, codes: set[types.CodeType]) -> str:
    """The line of a traced function, one of `codes`, that raised `error`, with a caret."""
    frames = [(f, at) for f, at in traceback.walk_tb(error.__traceback__) if f.f_code in codes]
    if not frames:
        return ""
    frame, line = frames[-1]
    summary = traceback.extract_tb(error.__traceback__)
    last = next(s for s in reversed(summary) if s.filename == frame.f_code.co_filename and s.lineno == line)
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    if not text:
        return f"\n  --> {frame.f_code.co_filename}:{line}"
    source = SourceFile(frame.f_code.co_filename, text)
    start, end = _columns(source.line(line), last)
    where = f"in `{frame.f_code.co_name}`"
    return "\n" + "\n".join(excerpt(Span(source, line, start, line, end), where)[:-1])


def _columns(text: str, frame: traceback.FrameSummary) -> tuple[int, int]:
    """The columns of the expression at fault. Python counts bytes from 0; without its columns, the whole line."""
    start, end = getattr(frame, "colno", None), getattr(frame, "end_colno", None)
    if start is None or end is None:
        return len(text) - len(text.lstrip()) + 1, len(text) + 1
    encoded = text.encode()
    stop = end if getattr(frame, "end_lineno", None) == frame.lineno else len(encoded)
    return len(encoded[:start].decode(errors="replace")) + 1, len(encoded[:stop].decode(errors="replace")) + 1


__all__ = ["CapturedArray", "TraceError", "Tracer", "array_dtype", "call", "trace"]
