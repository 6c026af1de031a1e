"""`Tracer`: the stand-in for a value inside a traced function. Operations on it build an expression."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from attngen.spec.expr import Expr, ExpressionError, Type, constant
from attngen.spec.operator import INT64_MAX, INT64_MIN, apply
from attngen.spec.operators import FUNCTIONS


class TraceError(TypeError):
    """A traced function cannot be expressed; the text names the place and what to write instead."""


class _NoSuchAttribute(TraceError, AttributeError):
    """Makes `hasattr` of a traced value False, as numpy and torch expect for foreign types."""


class Tracer:
    """The stand-in for a value inside a traced function; operators on it build an expression."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __pow__(self, exponent: Any, modulus: None = None) -> Any:
        if modulus is not None:
            raise TraceError("pow with three arguments cannot be traced: write (a**b) % c")
        return power(self, exponent)

    def __rpow__(self, base: Any) -> Any:
        return power(base, self)

    def __xor__(self, other: Any) -> Any:
        return exclusive_or(self, other)

    __rxor__ = __xor__

    def __lshift__(self, places: Any) -> Any:
        return _shifted("mul", "<<", self, places)

    def __rshift__(self, places: Any) -> Any:
        return _shifted("floordiv", ">>", self, places)

    def __rlshift__(self, other: Any) -> Any:
        return _shifted("mul", "<<", other, self)

    def __rrshift__(self, other: Any) -> Any:
        return _shifted("floordiv", ">>", other, self)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return call("floordiv", self, other), call("mod", self, other)

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return call("floordiv", other, self), call("mod", other, self)

    def __floor__(self) -> Any:
        return rounded("floor", self, "int")

    def __ceil__(self) -> Any:
        return rounded("ceil", self, "int")

    def __trunc__(self) -> Any:
        return call("int", self)

    def __pos__(self) -> Tracer:
        return self

    def __repr__(self) -> str:
        return f"Tracer({self.expr!r})"

    def __getattr__(self, name: str) -> Any:
        from attngen.language.foreign_calls import method

        found = method(name)
        if found is None:
            raise _NoSuchAttribute(f"a traced value has no `{name}`: it is one number. {available()}")
        return functools.partial(found, self)

    def __array_ufunc__(self, ufunc: Any, how: str, *inputs: Any, **kwargs: Any) -> Any:
        from attngen.language.foreign_calls import numpy_call

        if how != "__call__":
            raise TraceError(f"numpy.{ufunc.__name__}.{how} cannot be traced. {available()}")
        return numpy_call(ufunc.__name__, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from attngen.language.foreign_calls import numpy_call

        return numpy_call(function.__name__, args, kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from attngen.language.foreign_calls import torch_call

        return torch_call(function.__name__, args, kwargs or {})


def available() -> str:
    """The functions that a traced function may call, as a sentence."""
    return f"Functions are attngen's: {', '.join(sorted(FUNCTIONS))}"


def lift(value: Any) -> Expr:
    """The expression of a tracer or a number. Raises TraceError for other values."""
    if isinstance(value, Tracer):
        return value.expr
    if isinstance(value, (bool, int, float)):
        return constant(_plain(value))
    if is_numpy_scalar(value) and isinstance(value.item(), (bool, int, float)):
        return constant(_plain(value.item()))
    if hasattr(type(value), "refuse"):  # a captured array
        value.refuse()
    if getattr(value, "shape", None) == () and hasattr(value, "item") and not is_numpy_scalar(value):
        raise TraceError(
            f"a {type(value).__name__} without dimensions is not the value of a variable that the function refers to, so it "
            "would keep the value that it has now: assign it to such a variable, or write the number itself"
        )
    raise TraceError(f"a {type(value).__name__} cannot be part of an expression; index it, or use a number")


def is_numpy_scalar(value: Any) -> bool:
    """Whether `value` is a number of numpy, which is immutable, not an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _plain(value: Any) -> bool | int | float:
    """A number as bool, int or float, without a subclass such as IntEnum or numpy's float64."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        return float(value)
    if not INT64_MIN <= value <= INT64_MAX:
        raise TraceError(f"an integer of {value.bit_length()} bits does not fit 64: write a float")
    return int(value)


def call(op: str, *args: Any) -> Any:
    """The operator `op` applied to tracers and numbers. Raises TraceError."""
    operands = [lift(a) for a in args]
    try:
        return Tracer(apply(op, *operands))
    except ExpressionError as error:
        raise TraceError(f"{error.message}{'; ' + error.help if error.help else ''}") from error


@functools.cache
def function_of(name: str) -> Callable[..., Any]:
    """The language's function `name`, for functions that are traced."""

    def function(*args: Any) -> Any:
        return call(name, *args)

    function.__name__ = function.__qualname__ = name
    function.__module__ = "attngen"
    function.__doc__ = f"The language's `{name}`, for masks and scores that are Python functions."
    return function


def power(base: Any, exponent: Any) -> Any:
    """base ** exponent: an exact product if an integer is raised to a small whole number, else the operator."""
    if lift(base).type is Type.INT and isinstance(exponent, int) and not isinstance(exponent, bool) and 1 <= exponent <= 8:
        return functools.reduce(lambda x, y: call("mul", x, y), [base] * exponent)
    return call("pow", base, exponent)


def exclusive_or(a: Any, b: Any) -> Any:
    """a ^ b of truth values, which is `!=`."""
    if (lift(a).type, lift(b).type) != (Type.BOOL, Type.BOOL):
        raise TraceError("`^` takes truth values; there are no bit operations on integers")
    return call("ne", a, b)


def _shifted(op: str, symbol: str, value: Any, places: Any) -> Any:
    if isinstance(places, bool) or not isinstance(places, int) or not 0 <= places <= 62:
        raise TraceError(f"`{symbol}` takes a constant from 0 to 62 on its right; multiply or divide (//) instead")
    return call(op, value, 2**places)


def rounded(op: str, value: Any, then: str | None = None) -> Any:
    """floor or ceil; an integer is unchanged."""
    if lift(value).type is Type.INT:
        return Tracer(lift(value))
    result = call(op, value)
    return result if then is None else call(then, result)


def _install(method: str, op: str, reflected: str | None) -> None:
    setattr(Tracer, method, lambda self, *others: call(op, self, *others))
    if reflected is not None:
        setattr(Tracer, reflected, lambda self, other: call(op, other, self))


# Python's operator methods for rows of the table.
for _method, _op, _reflected in (
    ("__add__", "add", "__radd__"),
    ("__sub__", "sub", "__rsub__"),
    ("__mul__", "mul", "__rmul__"),
    ("__truediv__", "div", "__rtruediv__"),
    ("__floordiv__", "floordiv", "__rfloordiv__"),
    ("__mod__", "mod", "__rmod__"),
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


_ONE_NUMBER = "a traced value is one number"
# Python's methods that a traced value refuses, with what to write instead.
_REFUSED = {
    "bool": "a traced value is neither true nor false yet: write where(c, a, b) for `if`, a & b for `and`, a | b for `or`, "
    "~a for `not`, and two comparisons for a chained one",
    **dict.fromkeys(
        ("index", "int"),
        "a traced value is not a whole number yet: it indexes only captured arrays, those that the function refers to by a "
        "global or enclosing variable",
    ),
    "float": "a traced value is not a number yet: use the functions of attngen (exp, log, ...), not math's",
    "complex": "a traced value is not a complex number: expressions have truth values, integers and floats",
    "hash": "a traced value cannot be a key of a dict or set: put the values into an array and index that",
    "iter": f"{_ONE_NUMBER}: it cannot be iterated over",
    "len": f"{_ONE_NUMBER}: it has no length",
    "getitem": f"{_ONE_NUMBER}: it cannot be indexed",
    "contains": f"{_ONE_NUMBER}: nothing is `in` it",
    **dict.fromkeys(("matmul", "rmatmul"), f"{_ONE_NUMBER}: `@` multiplies matrices"),
    "round": "round() cannot be traced: write floor(x + 0.5)",
    "format": "a traced value has no text: what is made of it would not depend on its value",
}


def _refusal(message: str) -> Callable[..., NoReturn]:
    def refuse(self: Tracer, *_: Any) -> NoReturn:
        raise TraceError(message)

    return refuse


for _method, _message in _REFUSED.items():
    setattr(Tracer, f"__{_method}__", _refusal(_message))


class _OfTracersToo(type):
    """The metaclass of stand-ins for `int` and `float`; `isinstance(x, int)` behaves as for the original."""

    plain: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.plain)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Tracer) for a in args):
            return call(cls.plain.__name__, *args)
        return cls.plain(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


def _extreme(op: str) -> Callable[..., Any]:
    plain = getattr(builtins, op)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        of_one = len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], Tracer)
        values = tuple(args[0]) if of_one else args
        if not any(isinstance(v, Tracer) for v in values):
            return plain(values, **kwargs) if of_one else plain(*values, **kwargs)
        if kwargs or len(values) < 2:
            raise TraceError(f"{op}() of traced values takes two or more of them, and no `{next(iter(kwargs), 'axis')}`")
        return functools.reduce(lambda a, b: call(op, a, b), values)

    return chosen


def tracing_builtins() -> dict[str, Any]:
    """Python's builtins; int, float, min and max also accept tracers."""
    classes = {t.__name__: _OfTracersToo(t.__name__, (), {"plain": t}) for t in (int, float)}
    return {**vars(builtins), **classes, "min": _extreme("min"), "max": _extreme("max")}
