"""The bounds column of the operator table: interval arithmetic (Moore, Kearfott and Cloud 2009), written as expressions.

A bound may be wider than the values, never narrower. The interval of a float that may be NaN is from -inf to inf, or its ends
are NaN: `is_number` is false of both.
"""

from __future__ import annotations

from functools import reduce

from attngen.spec.expr import Apply, Const, Expr, Type, constant
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
    """No bound. Used for float arithmetic: rounding, infinities and NaN would need care that no mask has needed yet, and a
    bound that is too wide costs only speed."""
    return lambda *_: EVERY_VALUE[type]


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


def exact_integers(rule: Bounds) -> Bounds:
    """`rule` for integers; no bound for floats."""
    return lambda *args: rule(*args) if args[0].lo.type is INT else EVERY_VALUE[FLOAT]


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
    if single:  # of unknown sign: monotonic in a
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
