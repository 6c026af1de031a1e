"""The meaning of numpy's and torch's functions, and of their arrays' methods, for traced values.

A function has the meaning that its library documents, or is refused by its name: no argument is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attngen.language.functions import FUNCTIONS, cast, function
from attngen.language.tracer import TraceError, Tracer, available, called
from attngen.spec.expr import Expr, Type


def numpy_call(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Tracer:
    return _called(f"numpy.{name}", function(name), args, kwargs)


def torch_call(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Tracer:
    if name == "__getitem__":
        raise TraceError("this tensor is indexed by a traced value but is not captured: give it a variable of its own")
    in_place = {"inplace": False}.items() <= kwargs.items()
    return _called(f"torch.{name}", function(name), args, {k: v for k, v in kwargs.items() if k != "inplace" or not in_place})


def _called(title: str, meant: Callable[..., Expr] | None, args: Sequence[object], kwargs: Mapping[str, object]) -> Tracer:
    if meant is None:
        raise TraceError(f"{title} cannot be traced. {available()}")
    try:
        return called(meant, *args, **kwargs)
    except TraceError:
        raise
    except TypeError as error:
        given = f" with {', '.join(f'`{k}`' for k in kwargs)}" if kwargs else ""
        raise TraceError(f"{title}{given} cannot be traced. {available()}") from error


# --- methods of tensors and arrays

CONVERTED = {
    **dict.fromkeys(("bool", "bool_"), Type.BOOL),
    **dict.fromkeys(("int", "int32", "int64", "long"), Type.INT),
    **dict.fromkeys(("float", "float32"), Type.FLOAT),
}
UNCONVERTED = ("half", "bfloat16", "double", "short", "char", "byte")
HARMLESS = {"non_blocking", "copy", "memory_format", "device"}


def _converted(kind: Type, x: Tracer) -> Tracer:
    return called(lambda e: cast(e, kind), x)


def _to_dtype(method: str, x: Tracer, dtype: object) -> Tracer:
    if isinstance(dtype, Tracer):
        return _converted(dtype.expr.type, x)
    word = _dtype_word(dtype)
    if word in CONVERTED:
        return _converted(CONVERTED[word], x)
    raise TraceError(
        f".{method}({word}) cannot be traced: traced values are bool, int or fp32. Write .bool(), .int() or .float(), "
        "or leave the conversion out"
    )


def _dtype_word(dtype: object) -> str:
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def _to(x: Tracer, *args: object, **kwargs: object) -> Tracer:
    """torch's `.to`, with a dtype, a device or a tensor. Traced values have no device."""
    for keyword in kwargs:
        if keyword not in HARMLESS | {"dtype"}:
            raise TraceError(f".to with `{keyword}` cannot be traced")
    for given in (*args, kwargs.get("dtype")):
        if given is None or isinstance(given, bool) or (type(given).__name__ == "device") or _is_device(given):
            continue
        x = _to_dtype("to", x, given)
    return x


def _is_device(given: object) -> bool:
    return isinstance(given, str) and given.partition(":")[0] in ("cpu", "cuda", "mps", "xpu", "meta")


def _refused(method: str, x: Tracer) -> Tracer:
    return _to_dtype(method, x, method)


METHODS: dict[str, Callable[..., Tracer]] = {
    **{name: partial(_converted, kind) for name, kind in CONVERTED.items() if name.isalpha()},
    **{name: partial(_refused, name) for name in UNCONVERTED},
    "to": _to,
    "type": partial(_to_dtype, "type"),
    "astype": partial(_to_dtype, "astype"),
    "type_as": partial(_to_dtype, "type_as"),
    "where": lambda x, condition, other: called(FUNCTIONS["where"], condition, x, other),
    **dict.fromkeys(("item", "detach", "clone", "contiguous"), lambda x: x),
}


def method(name: str) -> Callable[..., Tracer] | None:
    """The meaning of a method of tensors or arrays; None if numbers have no such method."""
    if name in METHODS:
        return partial(_called_method, name, METHODS[name])
    meant = function(name)
    return None if meant is None else partial(_called_method, name, partial(called, meant))


def _called_method(name: str, meant: Callable[..., Tracer], x: Tracer, *args: object, **kwargs: object) -> Tracer:
    try:
        return meant(x, *args, **kwargs)
    except TraceError:
        raise
    except TypeError as error:
        shown = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        raise TraceError(f".{name}({shown}) cannot be traced. {available()}") from error
