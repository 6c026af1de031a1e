"""The derivative column of the operator table, where a rule is more than a line.

A rule takes the gradient of the result, the result and the operands, and gives the gradient of every operand.
"""

from __future__ import annotations

import math

from attngen.spec.expr import Const, Expr, constant
from attngen.spec.operator import FLOAT_ONE, FLOAT_ZERO, Derivative, apply, less, less_equal, mul, sub, where


def discrete(count: int) -> Derivative:
    """The result does not change smoothly with its operands: their gradient is zero."""
    return lambda g, out, *args: (None,) * count


def of_smaller(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    first = less_equal(a, b)
    return where(first, g, FLOAT_ZERO), where(first, FLOAT_ZERO, g)


def of_larger(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return of_smaller(g, out, b, a)  # b <= a: then a is the larger


def of_power(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr | None]:
    """The exponent's gradient is taken for 0 where the base is not positive, as torch does at 0 (0 * log 0)."""
    base = mul(g, mul(b, apply("pow", a, sub(b, FLOAT_ONE))))
    if isinstance(b, Const):
        return base, None
    positive = less(FLOAT_ZERO, a)
    return base, where(positive, mul(g, mul(out, apply("log", where(positive, a, FLOAT_ONE)))), FLOAT_ZERO)


LN2 = constant(math.log(2.0))
