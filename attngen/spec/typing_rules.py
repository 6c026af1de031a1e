"""The types column of the operator table: the types of an operator's operands and result."""

from __future__ import annotations

from attngen.diagnostics import counted
from attngen.spec.expr import ExpressionError, Type
from attngen.spec.operator import BOOL, FLOAT, INT, Typing


def _expect(name: str, types: tuple[Type, ...], count: int) -> None:
    if len(types) != count:
        raise ExpressionError(f"`{name}` takes {counted(count, 'operand')}, not {len(types)}")


def _numeric(name: str, types: tuple[Type, ...]) -> Type:
    if BOOL in types:
        combined = (
            "" if set(types) != {BOOL} or len(types) == 1 else "combine truth values with `and`, `or` and `not`; for a number, "
        )
        raise ExpressionError(f"`{name}` takes numbers, not a truth value", f"{combined}use where(condition, 1.0, 0.0)")
    return FLOAT if FLOAT in types else INT


def numbers(count: int) -> Typing:
    """Numbers, converted to float if one of them is a float; the result has their common type."""

    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, count)
        common = _numeric(name, types)
        return (common,) * count, common

    return typing


def floats(count: int) -> Typing:
    """Numbers, all converted to float; the result is a float."""

    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, count)
        _numeric(name, types)
        return (FLOAT,) * count, FLOAT

    return typing


OF_FLOATS = {"//": "floor(a / b)", "%": "a - b * floor(a / b)"}  # what operators of integers are called of floats


def integers(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
    _expect(name, types, 2)
    if types != (INT, INT):
        wrong = next(t for t in types if t is not INT)
        instead = f"write {OF_FLOATS[name]} for floats, or " if name in OF_FLOATS and wrong is FLOAT else ""
        raise ExpressionError(f"`{name}` takes integers, not a {wrong}", f"{instead}convert with int(...)")
    return types, INT


def comparison(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
    _expect(name, types, 2)
    if name in ("==", "!=") and types == (BOOL, BOOL):
        return types, BOOL
    common = _numeric(name, types)
    return (common, common), BOOL


def truth_values(count: int) -> Typing:
    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, count)
        for t in types:
            if t is not BOOL:
                bits = f", or write bit_{name}(a, b) for bits" if name in ("and", "or") and types == (INT, INT) else ""
                raise ExpressionError(f"`{name}` takes truth values, not {t}", f"compare two numbers, as in q >= k{bits}")
        return types, BOOL

    return typing


def selection(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
    _expect(name, types, 3)
    condition, *branches = types
    if condition is not BOOL:
        raise ExpressionError(f"the condition of `{name}` is {condition}, not bool", "compare two numbers, as in q >= k")
    if branches == [BOOL, BOOL]:
        return types, BOOL
    common = _numeric(name, tuple(branches))
    return (BOOL, common, common), common


def conversion(target: Type) -> Typing:
    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, 1)
        return types, target

    return typing
