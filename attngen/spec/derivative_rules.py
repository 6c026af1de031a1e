"""Rules of the derivative column of the operator table that are longer than a line.

A rule maps the gradient of the result, the result and the operands to the gradient of every operand. At kinks the rules have
the values of torch's autograd: half for each of two equal operands of min and max, as of torch.minimum; all for the operand of
them that is not a constant, as of torch.clamp; 0 for abs at 0.
"""

from __future__ import annotations

import math

from attngen.spec.expr import Const, Expr, constant
from attngen.spec.operator import FLOAT_ONE, FLOAT_ZERO, Derivative, add, apply, div, equal, less, mul, neg, sub, where


def discrete(count: int) -> Derivative:
    """The result does not change smoothly with its operands: their gradient is zero."""
    return lambda g, out, *args: (None,) * count


def of_extremum(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr | None, Expr | None]:
    """Gradients of the smaller or larger operand: all of `g` for the operand that the result equals, which of a number and NaN
    is the number. If both are equal, half for each, or all for the one beside a constant."""
    if isinstance(b, Const):
        return where(equal(a, out), g, FLOAT_ZERO), None
    if isinstance(a, Const):
        return None, where(equal(b, out), g, FLOAT_ZERO)
    share = where(equal(a, b), mul(g, constant(0.5)), g)
    return where(equal(a, out), share, FLOAT_ZERO), where(equal(b, out), share, FLOAT_ZERO)


def of_magnitude(g: Expr, out: Expr, a: Expr) -> tuple[Expr]:
    return (where(less(FLOAT_ZERO, a), g, where(less(a, FLOAT_ZERO), neg(g), FLOAT_ZERO)),)


def of_angle(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Gradients of atan2(a, b); 0 at the origin, as in torch."""
    square = add(mul(a, a), mul(b, b))
    share = where(equal(square, FLOAT_ZERO), FLOAT_ZERO, div(g, square))
    return mul(share, b), neg(mul(share, a))


def of_power(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr | None]:
    """Gradients of a ** b. That of a is 0 if b is 0; that of b is 0 if a is not positive, as in torch at 0 (0 * log 0)."""
    base = mul(g, mul(b, apply("pow", a, sub(b, FLOAT_ONE))))
    base = where(apply("eq", b, FLOAT_ZERO), FLOAT_ZERO, base)
    if isinstance(b, Const):
        return base, None
    positive = less(FLOAT_ZERO, a)
    return base, where(positive, mul(g, mul(out, apply("log", where(positive, a, FLOAT_ONE)))), FLOAT_ZERO)


LN2 = constant(math.log(2.0))
TWO_OVER_SQRT_PI = constant(2.0 / math.sqrt(math.pi))
