"""Formulas: numbers that the host computes from the sizes of a call.

A formula is written once, as Python over `sizes`. On numbers it computes; on `SYMBOLS` it returns its expression, which is
printed as C++ (`attngen.package`). So it branches by `select`, and compares by `smaller` and `larger`, whose types say what
they compute of numbers. Sizes are not negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

from attngen.spec.expr import Expr, Type, constant, name
from attngen.spec.operator import apply

Number: TypeAlias = "Symbol | int"


class Symbol:
    """A number that is known at the call: operations on it build an expression."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __add__(self, other: Number) -> Symbol:
        return _applied("add", self, other)

    def __sub__(self, other: Number) -> Symbol:
        return _applied("sub", self, other)

    def __mul__(self, other: Number) -> Symbol:
        return _applied("mul", self, other)

    def __rmul__(self, other: Number) -> Symbol:
        return _applied("mul", other, self)

    def __floordiv__(self, other: Number) -> Symbol:
        return _applied("floordiv", self, other)

    def __rfloordiv__(self, other: Number) -> Symbol:
        return _applied("floordiv", other, self)

    def __lt__(self, other: Number) -> Symbol:
        return _applied("lt", self, other)

    def __gt__(self, other: Number) -> Symbol:
        return _applied("gt", self, other)

    def __le__(self, other: Number) -> Symbol:
        return _applied("le", self, other)

    def __ge__(self, other: Number) -> Symbol:
        return _applied("ge", self, other)

    def __and__(self, other: Number) -> Symbol:
        return _applied("and", self, other)

    def __bool__(self) -> bool:
        raise TypeError("a formula branches by select(), and compares by smaller() and larger()")


def _applied(op: str, *operands: Number) -> Symbol:
    return Symbol(apply(op, *map(expression, operands)))


def _as_number(op: str, *operands: Number) -> Any:
    """A symbol where the type of a formula has a number."""
    return _applied(op, *operands)


def expression(value: Number) -> Expr:
    """What a formula returned for SYMBOLS as an expression over the names of sizes."""
    return value.expr if isinstance(value, Symbol) else constant(value)


class _Symbols(Mapping[str, Symbol]):
    """Sizes of a call that is not known: each is a symbol of its name."""

    def __getitem__(self, key: str) -> Symbol:
        return Symbol(name(key, Type.INT))

    def __iter__(self) -> NoReturn:
        raise TypeError("the sizes of a call that is not known have no list")

    __len__ = __iter__


SYMBOLS: Mapping[str, Any] = _Symbols()  # Any: a formula is typed as one of numbers


def smaller(a: int, b: int) -> int:
    return _as_number("min", a, b) if isinstance(a, Symbol) or isinstance(b, Symbol) else min(a, b)


def larger(a: int, b: int) -> int:
    return _as_number("max", a, b) if isinstance(a, Symbol) or isinstance(b, Symbol) else max(a, b)


def select(condition: bool, yes: int, no: int) -> int:
    """`yes` if the condition holds, else `no`. Both are computed: neither may divide by 0."""
    return _as_number("where", condition, yes, no) if isinstance(condition, Symbol) else yes if condition else no


def ceil_div(number: int, by: int) -> int:
    """`ceil(number / by)` of numbers that are not negative."""
    return (number + (by - 1)) // by
