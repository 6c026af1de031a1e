"""`Tracer`: the stand-in for a value inside a traced function. Operations on it build an expression."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from attngen.language.functions import COMPARISONS, FUNCTIONS
from attngen.spec.expr import Expr, ExpressionError, constant, within_limits
from attngen.spec.operator import INT64_MAX, INT64_MIN, apply
from attngen.spec.operators import FUNCTIONS as ROWS


class TraceError(TypeError):
    """A traced function cannot be expressed; the text names the place and what to write instead."""


class _NoSuchAttribute(TraceError, AttributeError):
    """Makes `hasattr` of a traced value False, as numpy and torch expect for foreign types."""


class Named(Protocol):
    """A function of a library, as it is handed to a stand-in."""

    __name__: str


class Tracer:
    """The stand-in for a value inside a traced function; operators on it build an expression."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __pow__(self, exponent: object, modulus: None = None) -> Tracer:
        if modulus is not None:
            raise TraceError("pow with three arguments cannot be traced: write (a**b) % c")
        return called(FUNCTIONS["pow"], self, exponent)

    def __rpow__(self, base: object) -> Tracer:
        return called(FUNCTIONS["pow"], base, self)

    def __divmod__(self, other: object) -> tuple[Tracer, Tracer]:
        return called(FUNCTIONS["floor_divide"], self, other), called(FUNCTIONS["remainder"], self, other)

    def __rdivmod__(self, other: object) -> tuple[Tracer, Tracer]:
        return called(FUNCTIONS["floor_divide"], other, self), called(FUNCTIONS["remainder"], other, self)

    def __floor__(self) -> Tracer:
        return call("int", called(FUNCTIONS["floor"], self))

    def __ceil__(self) -> Tracer:
        return call("int", called(FUNCTIONS["ceil"], self))

    def __round__(self, digits: None = None) -> Tracer:
        if digits is not None:
            raise TraceError("round() with digits cannot be traced: write round(x * 10) / 10")
        return call("int", called(FUNCTIONS["round"], self))

    def __trunc__(self) -> Tracer:
        return call("int", self)

    def __pos__(self) -> Tracer:
        return self

    def __repr__(self) -> str:
        return f"Tracer({self.expr!r})"

    def __getattr__(self, name: str) -> Callable[..., Tracer]:
        from attngen.language.foreign_calls import method

        found = method(name)
        if found is None:
            raise _NoSuchAttribute(f"a traced value has no `{name}`: it is one number. {available()}")
        return functools.partial(found, self)

    def __array_ufunc__(self, ufunc: Named, how: str, *inputs: object, **kwargs: object) -> Tracer:
        from attngen.language.foreign_calls import numpy_call

        if how != "__call__":
            raise TraceError(f"numpy.{ufunc.__name__}.{how} cannot be traced. {available()}")
        return numpy_call(ufunc.__name__, inputs, kwargs)

    def __array_function__(
        self, function: Named, types: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Tracer:
        from attngen.language.foreign_calls import numpy_call

        return numpy_call(function.__name__, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Named, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Tracer:
        from attngen.language.foreign_calls import torch_call

        return torch_call(function.__name__, args, kwargs or {})


def available() -> str:
    """The functions that a traced function may call, as a sentence."""
    from attngen.language.prelude import functions

    return f"Functions are attngen's: {', '.join(sorted(functions()))}"


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
            f"a {type(value).__name__} without dimensions is used that no variable of the function holds, so later changes of "
            "it would have no effect: assign it to a variable outside the function, or write the number itself"
        )
    raise TraceError(f"a {type(value).__name__} cannot be part of an expression; index it, or use a number")


def is_numpy_scalar(value: object) -> bool:
    """Whether `value` is a number of numpy, which is immutable, not an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_array(value: object) -> bool:
    """Whether `value` is an array of any library. numpy's scalars are immutable and count as numbers. Raises TraceError for one
    that has no shape, such as a nested tensor of torch."""
    try:
        return hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple) and not is_numpy_scalar(value)
    except RuntimeError as error:
        raise TraceError(f"a {type(value).__name__} without a shape cannot be captured; expected a dense array") from error


def _plain(value: bool | int | float) -> bool | int | float:
    """A number as bool, int or float, without a subclass such as IntEnum or numpy's float64."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        return float(value)
    if not INT64_MIN <= value <= INT64_MAX:
        raise TraceError(f"an integer of {value.bit_length()} bits does not fit 64: write a float")
    return int(value)


def operand(value: object) -> Expr | str | None:
    """The expression of a tracer or a number; None and text as they are. Raises TraceError for other values."""
    return value if value is None or isinstance(value, str) else lift(value)


def _applied(
    function: Callable[..., Expr], args: Iterable[object], options: Mapping[str, object] = MappingProxyType({})
) -> Tracer:
    try:
        return Tracer(within_limits(function(*args, **options)))
    except ExpressionError as error:
        raise TraceError(f"{error.message}{'; ' + error.help if error.help else ''}") from error


def call(op: str, *args: object) -> Tracer:
    """The language's operator `op` applied to tracers and numbers. Raises TraceError."""
    return _applied(functools.partial(apply, op), map(lift, args))


def called(function: Callable[..., Expr], *args: object, **options: object) -> Tracer:
    """A function of `attngen.language.functions` applied to tracers and numbers. Raises TraceError."""
    return _applied(function, map(operand, args), {name: operand(value) for name, value in options.items()})


@functools.cache
def function_of(name: str) -> Callable[..., Tracer]:
    """The language's function `name`, for functions that are traced: an operator, or a number of the prelude."""
    meaning = functools.partial(apply, name) if name in ROWS else FUNCTIONS[name]

    def function(*args: object) -> Tracer:
        return _applied(meaning, map(lift, args))

    function.__name__ = function.__qualname__ = name
    function.__module__ = "attngen"
    function.__doc__ = f"The language's `{name}`, for masks and scores that are Python functions."
    return function


def _install(method: str, name: str, reflected: bool) -> None:
    setattr(Tracer, f"__{method}__", lambda self, *others: called(FUNCTIONS[name], self, *others))
    if reflected:
        setattr(Tracer, f"__r{method}__", lambda self, other: called(FUNCTIONS[name], other, self))


# Python's operator methods: the function of each, and whether it has a reflected one.
for _method, _name, _reflected in (
    *((op, op, False) for op in (*COMPARISONS, "neg", "abs")),
    *((op, op, True) for op in ("add", "sub", "mul")),
    ("truediv", "div", True),
    ("floordiv", "floor_divide", True),
    ("mod", "remainder", True),
    ("and", "bitwise_and", True),
    ("or", "bitwise_or", True),
    ("xor", "bitwise_xor", True),
    ("lshift", "bitwise_left_shift", True),
    ("rshift", "bitwise_right_shift", True),
    ("invert", "bitwise_not", False),
):
    _install(_method, _name, _reflected)


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
    "format": "a traced value has no text: what is made of it would not depend on its value",
}


def _refusal(message: str) -> Callable[..., NoReturn]:
    def refuse(self: Tracer, *_: object) -> NoReturn:
        raise TraceError(message)

    return refuse


for _method, _message in _REFUSED.items():
    setattr(Tracer, f"__{_method}__", _refusal(_message))


class _OfTracersToo(type):
    """The metaclass of stand-ins for `int` and `float`; `isinstance(x, int)` behaves as for the original."""

    plain: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.plain)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if any(isinstance(a, Tracer) or is_array(a) for a in args):  # an array that is not captured is refused
            return call(cls.plain.__name__, *args)
        return cls.plain(*args, **kwargs)

    def __getattr__(cls, name: str) -> object:
        return getattr(cls.plain, name)


def _extreme(op: str) -> Callable[..., object]:
    plain = getattr(builtins, op)

    def chosen(*args: Any, **kwargs: object) -> object:
        of_one = len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], Tracer)
        values = tuple(args[0]) if of_one else args
        if not any(isinstance(v, Tracer) for v in values):
            return plain(values, **kwargs) if of_one else plain(*values, **kwargs)
        if kwargs or len(values) < 2:
            raise TraceError(
                f"{op}() of traced values needs two or more of them, and does not support `{next(iter(kwargs), 'axis')}`"
            )
        return functools.reduce(lambda a, b: call(op, a, b), values)

    return chosen


def tracing_builtins() -> dict[str, object]:
    """Python's builtins; int, float, min and max also accept tracers."""
    classes = {t.__name__: _OfTracersToo(t.__name__, (), {"plain": t}) for t in (int, float)}
    return {**vars(builtins), **classes, "min": _extreme("min"), "max": _extreme("max")}
