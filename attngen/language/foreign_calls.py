"""The meaning of numpy's and torch's functions, and of their arrays' methods, for traced values.

A function has the meaning that its library documents, or is refused by its name: no argument is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attngen.language.tracer import TraceError, Tracer, available, call, exclusive_or, lift, power, rounded
from attngen.spec.expr import Type, constant
from attngen.spec.operator import TABLE
from attngen.spec.operators import FUNCTIONS

# Rows of the operator table by other names that numpy or torch have for them.
OTHER_NAMES = {
    "absolute": "abs",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "negative": "neg",
    "minimum": "min",
    "maximum": "max",
    "expit": "sigmoid",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
    "invert": "not",
}
INFIX = {name for name, row in TABLE.items() if row.infix is not None and name.isidentifier()} - {"and", "or", "not"}
# min and max of numpy and torch reduce an array, or take an axis; int and float are types.
NOT_ELEMENTWISE = {"min", "max", "int", "float"}


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        raise TraceError("clamp needs a least or a greatest value")
    if min is not None:
        x = call("max", x, min)
    return x if max is None else call("min", x, max)


def _clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    return _clamp(x, a_min if min is None else min, a_max if max is None else max)


def _div(x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return call("div", x, other)
    if rounding_mode == "floor":
        return call("floordiv", x, other)
    raise TraceError(f"div with rounding_mode={rounding_mode!r} cannot be traced: write x // y, or attngen.int(x / y)")


def _filled(value: float, x: Any) -> Any:
    kind = lift(x).type
    return Tracer(constant(bool(value) if kind is Type.BOOL else int(value) if kind is Type.INT else float(value)))


# Functions composed of several rows, or with more arguments than the row.
COMPOSED: dict[str, Callable[..., Any]] = {
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "clip": _clip,
    "div": _div,
    "divide": _div,
    "true_divide": _div,
    "pow": power,
    "power": power,
    "floor": partial(rounded, "floor"),
    "ceil": partial(rounded, "ceil"),
    "square": lambda x: power(x, 2),
    "reciprocal": lambda x: call("div", 1.0, x),
    "relu": lambda x: call("max", x, 0),
    "logical_xor": exclusive_or,
    "bitwise_xor": exclusive_or,
    "zeros_like": partial(_filled, 0),
    "ones_like": partial(_filled, 1),
}


def function(name: str) -> Callable[..., Any] | None:
    """The meaning of numpy's or torch's function `name`; None if expressions cannot say it."""
    if name in COMPOSED:
        return COMPOSED[name]
    row = OTHER_NAMES.get(name, name)
    if name in NOT_ELEMENTWISE or (name not in OTHER_NAMES and name not in FUNCTIONS | INFIX):
        return None
    return partial(call, row)


def numpy_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _called("numpy", name, function(name), args, kwargs)


def torch_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name == "__getitem__":
        raise TraceError("this tensor is indexed by a traced value but is not captured: give it a variable of its own")
    plain = name.strip("_") if name.startswith("__") else name
    return _called("torch", name, function(plain), args, kwargs)


def _called(library: str, name: str, meant: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if meant is None:
        raise TraceError(f"{library}.{name} cannot be traced. {available()}")
    try:
        return meant(*args, **kwargs)
    except TraceError:
        raise
    except TypeError as error:
        given = f" with {', '.join(f'`{k}`' for k in kwargs)}" if kwargs else ""
        raise TraceError(f"{library}.{name}{given} cannot be traced. {available()}") from error


# --- methods of tensors and arrays

CONVERTED = {
    **dict.fromkeys(("bool", "bool_"), Type.BOOL),
    **dict.fromkeys(("int", "int32", "int64", "long"), Type.INT),
    **dict.fromkeys(("float", "float32"), Type.FLOAT),
}
UNCONVERTED = ("half", "bfloat16", "double", "short", "char", "byte")
HARMLESS = {"non_blocking", "copy", "memory_format", "device"}


def converted(x: Tracer, kind: Type) -> Tracer:
    """`x` converted as torch and numpy do: true unless 0 as bool, toward zero as int."""
    if x.expr.type is kind:
        return x
    result: Tracer = call("ne", x, 0) if kind is Type.BOOL else call(str(kind), x)
    return result


def _to_dtype(method: str, x: Tracer, dtype: Any) -> Tracer:
    if isinstance(dtype, Tracer):
        return converted(x, dtype.expr.type)
    word = _dtype_word(dtype)
    if word in CONVERTED:
        return converted(x, CONVERTED[word])
    raise TraceError(
        f".{method}({word}) cannot be traced: traced values are bool, int or fp32. Write .bool(), .int() or .float(), "
        "or leave the conversion out"
    )


def _dtype_word(dtype: Any) -> str:
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def _to(x: Tracer, *args: Any, **kwargs: Any) -> Tracer:
    """torch's `.to`, with a dtype, a device or a tensor. Traced values have no device."""
    for keyword in kwargs:
        if keyword not in HARMLESS | {"dtype"}:
            raise TraceError(f".to with `{keyword}` cannot be traced")
    for given in (*args, kwargs.get("dtype")):
        if given is None or isinstance(given, bool) or (type(given).__name__ == "device") or _is_device(given):
            continue
        x = _to_dtype("to", x, given)
    return x


def _is_device(given: Any) -> bool:
    return isinstance(given, str) and given.partition(":")[0] in ("cpu", "cuda", "mps", "xpu", "meta")


def _refused(method: str, x: Tracer) -> Tracer:
    return _to_dtype(method, x, method)


METHODS: dict[str, Callable[..., Any]] = {
    **{name: partial(lambda kind, x: converted(x, kind), kind) for name, kind in CONVERTED.items() if name.isalpha()},
    **{name: partial(_refused, name) for name in UNCONVERTED},
    "to": _to,
    "type": partial(_to_dtype, "type"),
    "astype": partial(_to_dtype, "astype"),
    "type_as": partial(_to_dtype, "type_as"),
    "where": lambda x, condition, other: call("where", condition, x, other),
    **dict.fromkeys(("item", "detach", "clone", "contiguous"), lambda x: x),
}


def method(name: str) -> Callable[..., Any] | None:
    """The meaning of a method of tensors or arrays; None if numbers have no such method."""
    meant = METHODS.get(name) or function(name)
    return None if meant is None else partial(_called_method, name, meant)


def _called_method(name: str, meant: Callable[..., Any], x: Tracer, *args: Any, **kwargs: Any) -> Any:
    try:
        return meant(x, *args, **kwargs)
    except TraceError:
        raise
    except TypeError as error:
        shown = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        raise TraceError(f".{name}({shown}) cannot be traced. {available()}") from error
