"""Plain Python functions as expressions: a mask or a score is called once with tracers, and what it returns is its `Expr`."""

from __future__ import annotations

import builtins
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attngen.spec.dtypes import DTYPES, NUMPY_BFLOAT16
from attngen.spec.expr import Expr, ExpressionError, Type, constant, gather
from attngen.spec.names import check_name
from attngen.spec.operator import TABLE, apply
from attngen.spec.operators import FUNCTIONS


class TraceError(TypeError):
    """A traced function does what an expression cannot say; the text says what to write instead."""


class Tracer:
    """Stands for a value inside a traced function; operators on it build an expression."""

    __slots__ = ("expr",)
    __array_ufunc__ = None  # numpy then leaves `array * tracer` to us
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __bool__(self) -> bool:
        raise TraceError(
            "a traced value has no truth value yet: write where(c, a, b) for `if`, a & b for `and`, a | b for `or`, ~a for "
            "`not`, and two comparisons for a chained one"
        )

    def __index__(self) -> int:
        raise TraceError(
            "this array is indexed by a traced value but is not captured: refer to it by a global or enclosing variable"
        )

    def __float__(self) -> float:
        raise TraceError("a traced value is not a number yet: use the functions of attngen (exp, log, ...), not math's")

    __int__ = __index__

    def __repr__(self) -> str:
        return f"Tracer({self.expr!r})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _TORCH_NAMES.get(function.__name__, function.__name__)
        if name == "clamp":
            return _clamp(*args, **(kwargs or {}))
        if name not in TABLE or kwargs:
            raise TraceError(f"torch.{function.__name__} cannot be traced; functions are {', '.join(sorted(FUNCTIONS))}")
        return call(name, *args)

    def to(self, *args: Any) -> Tracer:
        return self

    def float(self) -> Tracer:
        return Tracer(apply("float", self.expr))


_TORCH_NAMES = {"minimum": "min", "maximum": "max", "logical_and": "and", "logical_or": "or", "logical_not": "not"}


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = call("max", x, min)
    return x if max is None else call("min", x, max)


def lift(value: Any) -> Expr:
    """A tracer's expression, or a number's. Raises TraceError for anything else."""
    if isinstance(value, Tracer):
        return value.expr
    if isinstance(value, (bool, int, float)):
        return constant(value)
    if _is_numpy_scalar(value):
        return constant(value.item())
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        raise TraceError(
            f"a {type(value).__name__} without dimensions is not the value of a variable that the function refers to, so it "
            "would keep the value that it has now: assign it to such a variable, or write the number itself"
        )
    raise TraceError(f"a {type(value).__name__} cannot be part of an expression; index it, or use a number")


def _is_numpy_scalar(value: Any) -> bool:
    """Whether `value` is a number of numpy, which nothing can change, and no array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def call(op: str, *args: Any) -> Any:
    """`op` applied to tracers and numbers; a number where all are numbers."""
    result = apply(op, *(lift(a) for a in args))
    return Tracer(result)


def _install(method: str, op: str, reflected: str | None) -> None:
    setattr(Tracer, method, lambda self, *others: call(op, self, *others))
    if reflected is not None:
        setattr(Tracer, reflected, lambda self, other: call(op, other, self))


# Python's operator methods, by row of the table.
for _method, _op, _reflected in (
    ("__add__", "add", "__radd__"),
    ("__sub__", "sub", "__rsub__"),
    ("__mul__", "mul", "__rmul__"),
    ("__truediv__", "div", "__rtruediv__"),
    ("__floordiv__", "floordiv", "__rfloordiv__"),
    ("__mod__", "mod", "__rmod__"),
    ("__pow__", "pow", "__rpow__"),
    ("__and__", "and", "__rand__"),
    ("__or__", "or", "__ror__"),
    ("__lt__", "lt", None),
    ("__le__", "le", None),
    ("__gt__", "gt", None),
    ("__ge__", "ge", None),
    ("__eq__", "eq", None),
    ("__ne__", "ne", None),
    ("__neg__", "neg", None),
    ("__invert__", "not", None),
    ("__abs__", "abs", None),
):
    _install(_method, _op, _reflected)


class CapturedArray:
    """Stands for an array that a traced function indexes. `dtype_name` is None for elements that no kernel reads; `prefix`
    holds the indices given so far: `bias[b][q]` is `bias[b, q]`."""

    def __init__(self, name: str, array: Any, dtype_name: str | None, prefix: tuple[Any, ...] = ()) -> None:
        self.name, self.array, self.dtype_name, self._prefix = name, array, dtype_name, prefix

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.array.shape)[len(self._prefix) :]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, indices: Any) -> Any:
        at = (*self._prefix, *(indices if isinstance(indices, tuple) else (indices,)))
        sizes = tuple(self.array.shape)
        if len(at) > len(sizes):
            raise TraceError(f"`{self.name}` has {len(sizes)} dimensions and is indexed with {len(at)}")
        for index in at:
            if not isinstance(index, Tracer) and not _is_whole(index):
                raise TraceError(f"`{self.name}` is indexed with {index!r}; expected one integer for each dimension")
        if len(at) < len(sizes):
            return CapturedArray(self.name, self.array, self.dtype_name, at)
        return self.element(tuple(_from_the_end(i, size) for i, size in zip(at, sizes, strict=True)))

    def element(self, at: tuple[Any, ...] = ()) -> Tracer:
        """The element at these indices, read at each call: the array may change in between."""
        if self.dtype_name is None:
            raise TraceError(
                f"`{self.name}` has elements of {str(self.array.dtype).removeprefix('torch.')}; expected one of "
                f"{', '.join(DTYPES)}. Convert it outside the function"
            )
        return Tracer(gather(self.name, Type(DTYPES[self.dtype_name].kind), tuple(lift(i) for i in at)))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        if attribute not in _FACTS:
            raise TraceError(
                f"`{self.name}.{attribute}` would be computed once, when the function is traced: compute it outside the "
                "function, and refer to the result"
            )
        return getattr(self.array, attribute)


_FACTS = frozenset(("device", "dtype", "is_cuda", "ndim", "numel", "size"))  # what no change of its elements changes


def _is_whole(index: Any) -> bool:
    return hasattr(index, "__index__") and not isinstance(index, bool) and not _is_array(index)


def _from_the_end(index: Any, size: Any) -> Any:
    """A negative number counts from the end of a dimension whose size is a number, as everywhere in Python."""
    if isinstance(index, Tracer):
        return index
    whole = operator.index(index)
    return whole + size if whole < 0 and isinstance(size, int) else whole


def trace(
    function: Callable[..., Any],
    arguments: Mapping[str, Expr],
    known: Mapping[str, Any],
    captures: dict[str, CapturedArray],
) -> Expr:
    """The expression that `function` returns for `arguments`, by position.

    Arrays in its closure and globals become CapturedArrays, added to `captures`; names in `known` (declared inputs and
    params) replace globals of the same name. Raises TraceError.
    """
    prepared = _with_captures(function, known, captures, {})
    parameters = list(inspect.signature(function).parameters)
    values = [Tracer(e) for e in arguments.values()]
    if len(parameters) == len(values) - 1:  # a mask as FlexAttention has it: (b, h, q, k) without s
        values = values[1:]
    if len(parameters) != len(values):
        raise TraceError(
            f"`{function.__name__}` takes {len(parameters)} arguments; a score takes (s, b, h, q, k), a mask (b, h, q, k)"
        )
    try:
        return lift(prepared(*values))
    except RecursionError as error:
        raise TraceError(f"`{function.__name__}` calls itself without end, or builds too deep an expression") from error
    except ExpressionError as error:
        raise TraceError(f"{error.message}{'; ' + error.help if error.help else ''}") from error


def _with_captures(
    function: Callable[..., Any],
    known: Mapping[str, Any],
    captures: dict[str, CapturedArray],
    prepared: dict[types.FunctionType, types.FunctionType],
) -> Callable[..., Any]:
    """`function`, and the functions of its module that it calls, with arrays replaced by CapturedArrays."""
    if not isinstance(function, types.FunctionType):
        raise TraceError(f"expected a plain Python function, not a {type(function).__name__}")
    if function in prepared:
        return prepared[function]

    def replaced(name: str, value: Any) -> Any:
        if name in known:
            return known[name]
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            return _with_captures(value, known, captures, prepared)
        if not _is_array(value):
            return value
        dtype = array_dtype(value)
        if dtype is None:
            return CapturedArray(name, value, None)
        captured = captures.get(name)
        if captured is not None and captured.array is not value:
            raise TraceError(f"two different arrays are called `{name}`; rename one")
        if captured is None:
            check_name(name)
            captured = captures[name] = CapturedArray(name, value, dtype)
        return captured if captured.shape else captured.element()

    code = function.__code__
    used = set(_names_of(code))
    scope: dict[str, Any] = {n: v for n, v in known.items() if n in used}
    scope["__builtins__"] = _tracing_builtins()
    cells = tuple(types.CellType() for _ in code.co_freevars)
    prepared[function] = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells)
    scope |= {n: replaced(n, v) for n, v in function.__globals__.items() if n in used and n != "__builtins__"}
    for name, cell, original in zip(code.co_freevars, cells, function.__closure__ or (), strict=True):
        cell.cell_contents = replaced(name, original.cell_contents)
    return prepared[function]


def _names_of(code: types.CodeType) -> list[str]:
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names_of(c)]
    return [*code.co_names, *inner]


def _tracing_builtins() -> dict[str, Any]:
    """Python's builtins, with those that the table has working on tracers too."""

    def either(op: str) -> Callable[..., Any]:
        plain = getattr(builtins, op)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(a, Tracer) for a in args):
                return plain(*args, **kwargs)
            result = args[0]
            for other in args[1:]:
                result = call(op, result, other)
            return result if len(args) > 1 else call(op, result)

        return chosen

    return {**vars(builtins), **{op: either(op) for op in ("min", "max", "abs", "float", "int") if op in TABLE}}


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple) and not _is_numpy_scalar(value)


def array_dtype(value: Any) -> str | None:
    """The name of the element type of an array of any library; None for what is no array of a known type."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return None
    if dtype == NUMPY_BFLOAT16:
        return "bf16"
    text = str(dtype).removeprefix("torch.")
    return next((t.name for t in DTYPES.values() if t.torch == text), None)
