"""The bounds column of the operator table: interval arithmetic (Moore, Kearfott and Cloud 2009), written as expressions.

A bound may be wider than the values, never narrower. The interval of a float that may be NaN is from -inf to inf, or its ends
are NaN: `is_number` is false of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import product as product_of

from attngen.spec.expr import MAX_FLOAT, Apply, Const, Expr, Type, constant
from attngen.spec.operator import (
    BOOL,
    EVERY_VALUE,
    FLOAT,
    FLOAT_ZERO,
    INT,
    ONE,
    TRUE,
    ZERO,
    Bounds,
    Interval,
    add,
    apply,
    both,
    either,
    equal,
    floordiv,
    less,
    less_equal,
    maximum,
    minimum,
    mul,
    neg,
    negation,
    sub,
    where,
)


def unbounded(type: Type) -> Bounds:
    """No bound: one that is too wide costs only speed, or a clamp."""
    return lambda *_: EVERY_VALUE[type]


ROUNDING = 1e-5  # relative: many times the error of an operator of fp32 on any device
WHOLE_FLOATS = 2.0**24  # up to this magnitude, fp32 has every integer


def _outward(lo: float, hi: float) -> Interval:
    """An interval of floats, wider by their rounding; every value if that exceeds fp32."""
    lo, hi = lo - abs(lo) * ROUNDING, hi + abs(hi) * ROUNDING
    return Interval(constant(lo), constant(hi)) if -MAX_FLOAT < lo <= hi < MAX_FLOAT else EVERY_VALUE[FLOAT]


def _finite(operands: tuple[Interval, ...]) -> list[tuple[float, float]] | None:
    """The ends of intervals of floats if all are finite constants, so that no value is NaN or infinite."""
    ends = [(i.lo.value, i.hi.value) for i in operands if isinstance(i.lo, Const) and isinstance(i.hi, Const)]
    return ends if len(ends) == len(operands) and all(math.isfinite(v) for pair in ends for v in pair) else None


def of_ends(rule: Callable[..., float], defined: Callable[..., bool] = lambda *ends: True, exact: bool = False) -> Bounds:
    """The bound of a float operator that is monotonic in each operand: the least and the greatest of its values at the ends,
    which are constants for which the operator is `defined`; wider by its rounding, unless it is `exact`. Ends that are not
    constant have no bound: CUDA's functions need not be monotonic in the last bit."""

    def bounds(*operands: Interval) -> Interval:
        ends = _finite(operands)
        if ends is None or not defined(*ends):
            return EVERY_VALUE[FLOAT]
        try:
            values = [rule(*corner) for corner in product_of(*ends)]
        except (OverflowError, ValueError, ZeroDivisionError):
            return EVERY_VALUE[FLOAT]
        lo, hi = float(min(values)), float(max(values))
        return Interval(constant(lo), constant(hi)) if exact else _outward(lo, hi)

    return bounds


def above(least: float) -> Callable[..., bool]:
    """Whether a first operand is greater than `least` throughout."""
    return lambda *ends: bool(ends[0][0] > least)


def truncated(a: Interval) -> Interval:
    """The bound of the conversion to an integer of 32 bits, which of NaN is 0."""
    if a.lo.type is not FLOAT:
        return increasing("int")(a)
    ends = [end.value for end in a if isinstance(end, Const)]
    if len(ends) < 2 or any(end != end for end in ends):
        return Interval(constant(-(2**31)), constant(2**31 - 1))
    lo, hi = (
        end if abs(end) <= WHOLE_FLOATS else end + sign * abs(end) * ROUNDING for end, sign in zip(ends, (-1, 1), strict=True)
    )
    return Interval(apply("int", constant(float(lo))), apply("int", constant(float(hi))))


def is_number(a: Interval) -> Expr:
    """Whether no value of an interval is NaN. It may be false although none is."""
    if a.lo.type is not FLOAT or all(isinstance(end, Apply) and end.op == "float" for end in a):
        return TRUE
    return either(less(EVERY_VALUE[FLOAT].lo, a.lo), less(a.hi, EVERY_VALUE[FLOAT].hi))


def of_numbers(bound: Interval, *operands: Interval) -> Interval:
    """A bound of floats that holds if no operand is NaN."""
    known = reduce(both, map(is_number, operands))
    every = EVERY_VALUE[FLOAT]
    return Interval(where(known, bound.lo, every.lo), where(known, bound.hi, every.hi))


def by_type(of_integers: Bounds, of_floats: Bounds) -> Bounds:
    """Integers are exact, floats are rounded."""
    return lambda *args: (of_integers if args[0].lo.type is INT else of_floats)(*args)


def increasing(op: str) -> Bounds:
    """The bound of an increasing operator: it is applied to the lower and to the upper ends."""
    return lambda *args: Interval(apply(op, *(a.lo for a in args)), apply(op, *(a.hi for a in args)))


def _min_max(candidates: list[Expr]) -> Interval:
    lo = hi = candidates[0]
    for c in candidates[1:]:
        lo, hi = minimum(lo, c), maximum(hi, c)
    return Interval(lo, hi)


def product(a: Interval, b: Interval) -> Interval:
    if isinstance(a.lo, Const) and a.lo is a.hi:
        a, b = b, a
    if isinstance(b.lo, Const) and b.lo is b.hi:
        ends = mul(a.lo, b.lo), mul(a.hi, b.lo)
        return Interval(*ends) if b.lo.value >= 0 else Interval(*reversed(ends))
    return _min_max([mul(x, y) for x in a for y in b])


def absolute(a: Interval) -> Interval:
    outer = maximum(neg(a.lo), a.hi)
    if a.lo.type is FLOAT:
        return of_numbers(Interval(FLOAT_ZERO, outer), a)
    return Interval(maximum(ZERO, maximum(a.lo, neg(a.hi))), outer)


def quotient(a: Interval, b: Interval) -> Interval:
    single = b.lo is b.hi and b.lo is not ZERO  # what divides by 0 is refused where divisors are checked
    if single and isinstance(b.lo, Const):
        ends = floordiv(a.lo, b.lo), floordiv(a.hi, b.lo)
        return Interval(*ends) if b.lo.value > 0 else Interval(*reversed(ends))
    if single:  # sign of b unknown: monotonic in a
        return _min_max([floordiv(x, b.lo) for x in a])
    if isinstance(b.lo, Const) and b.lo.value > 0:
        return _min_max([floordiv(x, y) for x in a for y in b])
    outer = maximum(apply("abs", a.lo), apply("abs", a.hi))  # |a // b| <= |a| for every b but 0
    return Interval(sub(neg(outer), ONE), outer)


def remainder(a: Interval, b: Interval) -> Interval:
    positive = isinstance(b.lo, Const) and b.lo.value > 0
    least = ZERO if positive else minimum(ZERO, add(b.lo, ONE))
    most = sub(b.hi, ONE) if positive else maximum(ZERO, sub(b.hi, ONE))
    if b.lo is not b.hi or b.lo is ZERO:
        return Interval(least, most)
    same = equal(floordiv(a.lo, b.lo), floordiv(a.hi, b.lo))  # with the same quotient, the remainder grows with the dividend
    return Interval(where(same, apply("mod", a.lo, b.lo), least), where(same, apply("mod", a.hi, b.lo), most))


def below(a: Interval, b: Interval) -> Interval:
    return Interval(less(a.hi, b.lo), less(a.lo, b.hi))


def at_most(a: Interval, b: Interval) -> Interval:
    """`a <= b`, which is false of NaN: -inf <= x <= inf does not say that x is a number. Ends that are the same do, if they
    compare at all."""
    numbers = [is_number(i) for i in (a, b) if i.lo is not i.hi]
    return Interval(reduce(both, numbers, less_equal(a.hi, b.lo)), less_equal(a.lo, b.hi))


def equality(a: Interval, b: Interval) -> Interval:
    if a.lo.type is BOOL:
        known = both(apply("eq", a.lo, a.hi), apply("eq", b.lo, b.hi))
        agree = apply("eq", a.lo, b.lo)
        return Interval(both(known, agree), either(negation(known), agree))
    meet = both(less_equal(a.lo, b.hi), less_equal(b.lo, a.hi))
    return Interval(both(both(equal(a.lo, a.hi), equal(b.lo, b.hi)), equal(a.lo, b.lo)), meet)


def inequality(a: Interval, b: Interval) -> Interval:
    same = equality(a, b)
    return Interval(negation(same.hi), negation(same.lo))


def selected(c: Interval, a: Interval, b: Interval) -> Interval:
    if a.lo.type is BOOL:
        lo, hi = both(a.lo, b.lo), either(a.hi, b.hi)
    else:
        union = Interval(minimum(a.lo, b.lo), maximum(a.hi, b.hi))
        lo, hi = of_numbers(union, a, b) if a.lo.type is FLOAT else union
    return Interval(where(c.lo, a.lo, where(c.hi, lo, b.lo)), where(c.lo, a.hi, where(c.hi, hi, b.hi)))


# --- bits of integers: two's complement ------------------------------------------------------------------------------------


def _whole_powers(a: Interval, b: Interval) -> tuple[int, int] | None:
    """The least -2**n and greatest 2**n - 1 that contain two constant intervals, within 64 bits."""
    ends = [end.value for end in (*a, *b) if isinstance(end, Const)]
    if len(ends) < 4:
        return None
    bits = min(max(int(end if end >= 0 else -end - 1).bit_length() for end in ends), 63)
    return -(2**bits), 2**bits - 1


def _nonnegative(*intervals: Interval) -> Expr:
    return reduce(both, [less_equal(ZERO, i.lo) for i in intervals])


def bits_of_both(a: Interval, b: Interval) -> Interval:
    powers = _whole_powers(a, b)
    least = EVERY_VALUE[INT].lo if powers is None else constant(powers[0])
    of_a = where(_nonnegative(b), minimum(a.hi, b.hi), a.hi)
    below = where(_nonnegative(a), of_a, where(_nonnegative(b), b.hi, maximum(a.hi, b.hi)))
    return Interval(where(either(_nonnegative(a), _nonnegative(b)), ZERO, least), below)


def bits_of_either(a: Interval, b: Interval) -> Interval:
    powers = _whole_powers(a, b)
    most = add(maximum(a.hi, ZERO), maximum(b.hi, ZERO)) if powers is None else constant(powers[1])
    return Interval(where(_nonnegative(a, b), maximum(a.lo, b.lo), minimum(a.lo, b.lo)), most)


def bits_of_one(a: Interval, b: Interval) -> Interval:
    powers = _whole_powers(a, b)
    least, most = EVERY_VALUE[INT] if powers is None else (constant(powers[0]), constant(powers[1]))
    if powers is None:
        most = where(_nonnegative(a, b), add(maximum(a.hi, ZERO), maximum(b.hi, ZERO)), most)
    return Interval(where(_nonnegative(a, b), ZERO, least), most)
