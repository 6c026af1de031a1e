"""The simpler column of the operator table: identities that hold for every value. `0.0 * x` is none: x may be NaN."""

from __future__ import annotations

from attngen.spec.expr import Apply, Const, Expr, Type, constant
from attngen.spec.operator import Simpler


def neutral(first: tuple[Const, ...] = (), last: tuple[Const, ...] = ()) -> Simpler:
    """Constants as the first or the last of two operands, which leave the other as it is."""

    def simpler(a: Expr, b: Expr) -> Expr | None:
        return b if a in first else a if b in last else None

    return simpler


def of_truth_values(neutral: bool) -> Simpler:
    """`and`, of which true is neutral, or `or`, of which false is."""

    def simpler(a: Expr, b: Expr) -> Expr | None:
        if a is b or b is constant(neutral):
            return a
        if a is constant(neutral):
            return b
        return constant(not neutral) if constant(not neutral) in (a, b) else None

    return simpler


def extremum(op: str) -> Simpler:
    """The smaller or larger of two operands, of which one may be an operand of the other already."""

    def simpler(a: Expr, b: Expr) -> Expr | None:
        if a is b:
            return a
        nested = ((a, b), (b, a))
        return next((outer for one, outer in nested if isinstance(outer, Apply) and outer.op == op and one in outer.args), None)

    return simpler


def involution(op: str) -> Simpler:
    """An operator that undoes itself."""
    return lambda a: a.args[0] if isinstance(a, Apply) and a.op == op else None


def conversion_from(type: Type) -> Simpler:
    """The conversion of what has the type already."""
    return lambda a: a if a.type is type else None


def remainder_of_one(a: Expr, b: Expr) -> Expr | None:
    return constant(0) if b is constant(1) else None


def choice(condition: Expr, a: Expr, b: Expr) -> Expr | None:
    """Between equal values, or by a condition that is known."""
    if isinstance(condition, Const):
        return a if condition.value else b
    return a if a is b else None
