"""The table of operators: the only place where an operator exists.

A row says, for one operator:

- **types**: what operands it takes and what it gives;
- **cuda**: its text in generated CUDA, by the type of its operands;
- **array**: its meaning on arrays, as a function of the namespace (`numpy` or `torch`) and the operands;
- **derivative**: reverse mode: from the gradient of the result, the result and the operands, the gradient of every operand;
- **bounds**: interval arithmetic: from an interval for every operand, an interval for the result.

Derivatives and bounds are written as expressions, so one rule serves generated CUDA, the oracle and the tests. A row
without one of the columns cannot be made: `DISCRETE`, `UNBOUNDED` and the like say explicitly what a column lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from attngen.spec.expr import (
    MAX_DEPTH,
    MAX_SIZE,
    Apply,
    Const,
    Expr,
    ExpressionError,
    Scalar,
    Type,
    constant,
    intern_apply,
)

BOOL, INT, FLOAT = Type.BOOL, Type.INT, Type.FLOAT


class Interval(NamedTuple):
    """All values an expression may take: `lo <= value <= hi`. For a truth value, `lo` is "always" and `hi` is "sometimes"."""

    lo: Expr
    hi: Expr


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

EVERY_VALUE: dict[Type, Interval] = {
    BOOL: Interval(constant(False), constant(True)),
    INT: Interval(constant(INT64_MIN), constant(INT64_MAX)),
    FLOAT: Interval(constant(-math.inf), constant(math.inf)),
}


class Spelling(NamedTuple):
    """How a row is written: `{0}` stands for the first operand; `precedence` is that of the outermost C operator."""

    text: str
    precedence: int


class Infix(NamedTuple):
    """How a row is written in the language: its symbol and how tightly it binds (`not` and unary minus: prefix)."""

    symbol: str
    precedence: int


CALL, UNARY, MULTIPLY, ADD, COMPARE, EQUAL, AND, OR, CONDITIONAL = 16, 15, 13, 12, 10, 9, 5, 4, 2  # precedence in C

Typing = Callable[[str, tuple[Type, ...]], tuple[tuple[Type, ...], Type]]
Derivative = Callable[..., tuple[Expr | None, ...]]
Bounds = Callable[..., Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row. `nonnegative` is a shorter CUDA text that is right when no operand is negative; `helpers` are device
    functions that the CUDA text calls (`templates/parts/integer_math.cuh.j2`)."""

    name: str
    typing: Typing
    cuda: dict[Type, Spelling]
    array: Callable[..., Any]
    derivative: Derivative
    bounds: Bounds
    infix: Infix | None = None
    nonnegative: Spelling | None = None
    helpers: tuple[str, ...] = ()
    what: str = ""


# --- types ------------------------------------------------------------------------------------------------------------


def _expect(name: str, types: tuple[Type, ...], count: int) -> None:
    if len(types) != count:
        raise ExpressionError(f"`{name}` takes {count} operand{'s' * (count != 1)}, not {len(types)}")


def _numeric(name: str, types: tuple[Type, ...]) -> Type:
    if BOOL in types:
        raise ExpressionError(f"`{name}` takes numbers, not a truth value", "use where(condition, 1.0, 0.0)")
    return FLOAT if FLOAT in types else INT


def numbers(count: int) -> Typing:
    """Numbers, integers becoming floats where they meet one; the result has their common type."""

    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, count)
        common = _numeric(name, types)
        return (common,) * count, common

    return typing


def floats(count: int) -> Typing:
    """Numbers, all taken as floats; the result is a float."""

    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, count)
        _numeric(name, types)
        return (FLOAT,) * count, FLOAT

    return typing


def integers(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
    _expect(name, types, 2)
    if types != (INT, INT):
        wrong = next(t for t in types if t is not INT)
        raise ExpressionError(f"`{name}` takes integers, not a {wrong}", "convert with int(...)")
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
                raise ExpressionError(f"`{name}` takes truth values, not {t}", "compare it with something, as in q >= k")
        return types, BOOL

    return typing


def selection(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
    _expect(name, types, 3)
    condition, *branches = types
    if condition is not BOOL:
        raise ExpressionError(f"the condition of `{name}` is {condition}, not bool", "compare it with something")
    if branches == [BOOL, BOOL]:
        return types, BOOL
    common = _numeric(name, tuple(branches))
    return (BOOL, common, common), common


def conversion(target: Type) -> Typing:
    def typing(name: str, types: tuple[Type, ...]) -> tuple[tuple[Type, ...], Type]:
        _expect(name, types, 1)
        return types, target

    return typing


# --- expressions used by the rules -------------------------------------------------------------------------------------


def apply(op: str, *args: Expr) -> Expr:
    """`op` applied to `args`: checks and converts types, folds constants, drops what has no effect.

    Raises ExpressionError where the operands have no meaning for `op`, or the expression grows too large.
    """
    row = TABLE[op]
    wanted, result = row.typing(row.infix.symbol if row.infix else op, tuple(a.type for a in args))
    args = tuple(apply("float", a) if want is FLOAT and a.type is INT else a for a, want in zip(args, wanted, strict=True))
    if all(isinstance(a, Const) for a in args):
        folded = _fold(row, result, tuple(a.value for a in args if isinstance(a, Const)))
        if folded is not None:
            return folded
    simpler = _simplify(op, args, result)
    if simpler is not None:
        return simpler
    node = intern_apply(op, result, args)
    if node.size > MAX_SIZE:
        raise ExpressionError(f"the expression has more than {MAX_SIZE} nodes", "split it, or use a captured tensor")
    if node.depth > 20 * MAX_DEPTH:
        raise ExpressionError("the expression is nested too deeply", "split it, or use a captured tensor")
    return node


def _fold(row: Operator, result: Type, values: tuple[Scalar, ...]) -> Const | None:
    if row.name in ("floordiv", "mod") and values[1] == 0:
        raise ExpressionError(f"`{row.infix.symbol if row.infix else row.name}` by zero")
    try:
        value = row.array(PYTHON, *values)
    except (OverflowError, ValueError, ZeroDivisionError):
        return None  # the generated code computes what IEEE arithmetic says
    if isinstance(value, complex):  # Python's own answer to a root of a negative number; IEEE's is NaN
        return None
    if result is INT:
        if not INT64_MIN <= value <= INT64_MAX:
            raise ExpressionError("an integer constant does not fit 64 bits", "use a float")
        return constant(int(value))
    return constant(bool(value)) if result is BOOL else constant(float(value))


def _simplify(op: str, args: tuple[Expr, ...], result: Type) -> Expr | None:
    """`args` reduced by the identities that hold for every value (and so not `0.0 * x`)."""
    first, last = args[0], args[-1]
    match op:
        case "and" | "or":
            neutral = constant(op == "and")
            if first is last or last is neutral:
                return first
            if first is neutral:
                return last
            absorbing = constant(op == "or")
            return absorbing if absorbing in args else None
        case "not" if isinstance(first, Apply) and first.op == "not":
            return first.args[0]
        case "add" if first is ZERO:
            return last
        case "add" | "sub" if last is ZERO:
            return first
        case "mul" if first in (ONE, FLOAT_ONE):
            return last
        case "mul" | "div" if last in (ONE, FLOAT_ONE):
            return first
        case "floordiv" if last is ONE:
            return first
        case "mod" if last is ONE:
            return ZERO
        case "min" | "max" if first is last:
            return first
        case "min" | "max" if isinstance(last, Apply) and last.op == op and first in last.args:
            return last
        case "min" | "max" if isinstance(first, Apply) and first.op == op and last in first.args:
            return first
        case "neg" if isinstance(first, Apply) and first.op == "neg":
            return first.args[0]
        case "float" | "int" if first.type is result:
            return first
        case "where" if isinstance(first, Const):
            return args[1] if first.value else args[2]
        case "where" if args[1] is args[2]:
            return last
    return None


class _PythonNamespace:
    """The functions of numpy that rows use, on Python scalars: exact integers, for folding constants."""

    exp, log, log2, sqrt, tanh, sin, cos = math.exp, math.log, math.log2, math.sqrt, math.tanh, math.sin, math.cos
    floor, ceil, fabs = math.floor, math.ceil, abs

    @staticmethod
    def divide(a: float, b: float) -> float:
        return a / b

    @staticmethod
    def pow(a: float, b: float) -> Any:
        return a**b

    @staticmethod
    def exp2(x: float) -> float:
        return float(2.0**x)

    @staticmethod
    def abs(x: Any) -> Any:
        return abs(x)

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return max(a, b)

    @staticmethod
    def floor_divide(a: int, b: int) -> int:
        return a // b

    @staticmethod
    def remainder(a: int, b: int) -> int:
        return a % b

    @staticmethod
    def logical_and(a: bool, b: bool) -> bool:
        return a and b

    @staticmethod
    def logical_or(a: bool, b: bool) -> bool:
        return a or b

    @staticmethod
    def logical_not(a: bool) -> bool:
        return not a

    @staticmethod
    def where(c: bool, a: Any, b: Any) -> Any:
        return a if c else b


PYTHON = _PythonNamespace()
ZERO, ONE, FLOAT_ONE = constant(0), constant(1), constant(1.0)
FLOAT_ZERO = constant(0.0)
TRUE, FALSE = constant(True), constant(False)


def neg(a: Expr) -> Expr:
    return apply("neg", a)


def add(a: Expr, b: Expr) -> Expr:
    return apply("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return apply("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return apply("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return apply("div", a, b)


def floordiv(a: Expr, b: Expr) -> Expr:
    return apply("floordiv", a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    return apply("min", a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    return apply("max", a, b)


def less(a: Expr, b: Expr) -> Expr:
    return apply("lt", a, b)


def less_equal(a: Expr, b: Expr) -> Expr:
    return apply("le", a, b)


def equal(a: Expr, b: Expr) -> Expr:
    return apply("eq", a, b)


def both(a: Expr, b: Expr) -> Expr:
    return apply("and", a, b)


def either(a: Expr, b: Expr) -> Expr:
    return apply("or", a, b)


def negation(a: Expr) -> Expr:
    return apply("not", a)


def where(c: Expr, a: Expr, b: Expr) -> Expr:
    return apply("where", c, a, b)


# --- bounds -------------------------------------------------------------------------------------------------------------


def unbounded(type: Type) -> Bounds:
    """Nothing is known of the result. Said of float arithmetic: rounding, infinities and NaN would need care that no mask
    has asked for yet, and a bound that is too wide costs speed only."""
    return lambda *_: EVERY_VALUE[type]


def exact_integers(rule: Bounds) -> Bounds:
    """`rule` for integers; nothing is known of floats."""
    return lambda *args: rule(*args) if args[0].lo.type is INT else EVERY_VALUE[FLOAT]


def increasing(op: str) -> Bounds:
    """The operator applied to the lower ends and to the upper ends."""
    return lambda *args: Interval(apply(op, *(a.lo for a in args)), apply(op, *(a.hi for a in args)))


def _min_max(candidates: list[Expr]) -> Interval:
    lo = hi = candidates[0]
    for c in candidates[1:]:
        lo, hi = minimum(lo, c), maximum(hi, c)
    return Interval(lo, hi)


def _product(a: Interval, b: Interval) -> Interval:
    if isinstance(a.lo, Const) and a.lo is a.hi:
        a, b = b, a
    if isinstance(b.lo, Const) and b.lo is b.hi:
        ends = mul(a.lo, b.lo), mul(a.hi, b.lo)
        return Interval(*ends) if b.lo.value >= 0 else Interval(*reversed(ends))
    return _min_max([mul(x, y) for x in a for y in b])


def _absolute(a: Interval) -> Interval:
    outer = maximum(neg(a.lo), a.hi)
    if a.lo.type is FLOAT:
        return Interval(FLOAT_ZERO, outer)
    return Interval(maximum(ZERO, maximum(a.lo, neg(a.hi))), outer)


def _quotient(a: Interval, b: Interval) -> Interval:
    if isinstance(b.lo, Const) and b.lo is b.hi:
        ends = floordiv(a.lo, b.lo), floordiv(a.hi, b.lo)
        return Interval(*ends) if b.lo.value > 0 else Interval(*reversed(ends))
    if isinstance(b.lo, Const) and b.lo.value > 0:
        return _min_max([floordiv(x, y) for x in a for y in b])
    outer = maximum(apply("abs", a.lo), apply("abs", a.hi))  # |a // b| <= |a| for every b but 0
    return Interval(sub(neg(outer), ONE), outer)


def _remainder(a: Interval, b: Interval) -> Interval:
    if isinstance(b.lo, Const) and b.lo is b.hi and b.lo.value > 0:
        same = equal(floordiv(a.lo, b.lo), floordiv(a.hi, b.lo))
        top = sub(b.lo, ONE)
        return Interval(where(same, apply("mod", a.lo, b.lo), ZERO), where(same, apply("mod", a.hi, b.lo), top))
    if isinstance(b.lo, Const) and b.lo.value > 0:
        return Interval(ZERO, sub(b.hi, ONE))
    outer = maximum(apply("abs", b.lo), apply("abs", b.hi))
    return Interval(neg(outer), outer)


def _equality(a: Interval, b: Interval) -> Interval:
    if a.lo.type is BOOL:
        known = both(apply("eq", a.lo, a.hi), apply("eq", b.lo, b.hi))
        agree = apply("eq", a.lo, b.lo)
        return Interval(both(known, agree), either(negation(known), agree))
    meet = both(less_equal(a.lo, b.hi), less_equal(b.lo, a.hi))
    return Interval(both(both(equal(a.lo, a.hi), equal(b.lo, b.hi)), equal(a.lo, b.lo)), meet)


def _inequality(a: Interval, b: Interval) -> Interval:
    same = _equality(a, b)
    return Interval(negation(same.hi), negation(same.lo))


def _selected(c: Interval, a: Interval, b: Interval) -> Interval:
    if a.lo.type is BOOL:
        lo, hi = both(a.lo, b.lo), either(a.hi, b.hi)
    else:
        lo, hi = minimum(a.lo, b.lo), maximum(a.hi, b.hi)
    return Interval(
        where(c.lo, a.lo, where(c.hi, lo, b.lo)),
        where(c.lo, a.hi, where(c.hi, hi, b.hi)),
    )


# --- derivatives ----------------------------------------------------------------------------------------------------------


def discrete(count: int) -> Derivative:
    """The result does not change smoothly with its operands: their gradient is zero."""
    return lambda g, out, *args: (None,) * count


def _of_smaller(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    first = less_equal(a, b)
    return where(first, g, FLOAT_ZERO), where(first, FLOAT_ZERO, g)


def _of_larger(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return _of_smaller(g, out, b, a)  # b <= a: then a is the larger


def _of_power(g: Expr, out: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr | None]:
    """The exponent's gradient is taken for 0 where the base is not positive, as torch does at 0 (0 * log 0)."""
    base = mul(g, mul(b, apply("pow", a, sub(b, FLOAT_ONE))))
    if isinstance(b, Const):
        return base, None
    positive = less(FLOAT_ZERO, a)
    return base, where(positive, mul(g, mul(out, apply("log", where(positive, a, FLOAT_ONE)))), FLOAT_ZERO)


LN2 = constant(math.log(2.0))


# --- the table --------------------------------------------------------------------------------------------------------------


def both_types(text: str, precedence: int, float_text: str | None = None) -> dict[Type, Spelling]:
    return {INT: Spelling(text, precedence), FLOAT: Spelling(float_text or text, precedence)}


def as_float(text: str, precedence: int = CALL) -> dict[Type, Spelling]:
    return {FLOAT: Spelling(text, precedence)}


def as_bool(text: str, precedence: int) -> dict[Type, Spelling]:
    return {BOOL: Spelling(text, precedence)}


def _compare(name: str, symbol: str, array: Callable[..., Any], bounds: Bounds, precedence: int = COMPARE) -> Operator:
    spelling = Spelling(f"{{0}} {symbol} {{1}}", precedence)
    cuda = dict.fromkeys((INT, FLOAT, BOOL), spelling)
    return Operator(name=name, typing=comparison, cuda=cuda, array=array, derivative=discrete(2), bounds=bounds,
                    infix=Infix(symbol, 4))  # fmt: skip


# fmt: off
ROWS: tuple[Operator, ...] = (
    Operator(name="add", infix=Infix("+", 5), typing=numbers(2), cuda=both_types("{0} + {1}", ADD),
             array=lambda xp, a, b: a + b, derivative=lambda g, out, a, b: (g, g), bounds=exact_integers(increasing("add"))),
    Operator(name="sub", infix=Infix("-", 5), typing=numbers(2), cuda=both_types("{0} - {1}", ADD),
             array=lambda xp, a, b: a - b, derivative=lambda g, out, a, b: (g, neg(g)),
             bounds=exact_integers(lambda a, b: Interval(sub(a.lo, b.hi), sub(a.hi, b.lo)))),
    Operator(name="mul", infix=Infix("*", 6), typing=numbers(2), cuda=both_types("{0} * {1}", MULTIPLY),
             array=lambda xp, a, b: a * b, derivative=lambda g, out, a, b: (mul(g, b), mul(g, a)),
             bounds=exact_integers(_product)),
    Operator(name="div", infix=Infix("/", 6), typing=floats(2), cuda=as_float("{0} / {1}", MULTIPLY),
             array=lambda xp, a, b: xp.divide(a, b),
             derivative=lambda g, out, a, b: (div(g, b), neg(div(mul(g, out), b))), bounds=unbounded(FLOAT)),
    Operator(name="floordiv", infix=Infix("//", 6), typing=integers, cuda={INT: Spelling("floor_div({0}, {1})", CALL)},
             nonnegative=Spelling("{0} / {1}", MULTIPLY), helpers=("floor_div",),
             array=lambda xp, a, b: xp.floor_divide(a, b), derivative=discrete(2), bounds=_quotient,
             what="the quotient of integers, rounded down"),
    Operator(name="mod", infix=Infix("%", 6), typing=integers, cuda={INT: Spelling("floor_mod({0}, {1})", CALL)},
             nonnegative=Spelling("{0} % {1}", MULTIPLY), helpers=("floor_mod",),
             array=lambda xp, a, b: xp.remainder(a, b), derivative=discrete(2), bounds=_remainder,
             what="the remainder of `//`: it has the divisor's sign"),
    Operator(name="neg", infix=Infix("-", 7), typing=numbers(1), cuda=both_types("-{0}", UNARY),
             array=lambda xp, a: -a, derivative=lambda g, out, a: (neg(g),),
             bounds=lambda a: Interval(neg(a.hi), neg(a.lo))),
    Operator(name="min", typing=numbers(2), cuda=both_types("min({0}, {1})", CALL, "fminf({0}, {1})"),
             array=lambda xp, a, b: xp.minimum(a, b), derivative=_of_smaller, bounds=increasing("min"),
             what="the smaller of two numbers"),
    Operator(name="max", typing=numbers(2), cuda=both_types("max({0}, {1})", CALL, "fmaxf({0}, {1})"),
             array=lambda xp, a, b: xp.maximum(a, b), derivative=_of_larger, bounds=increasing("max"),
             what="the larger of two numbers"),
    Operator(name="abs", typing=numbers(1), cuda=both_types("abs({0})", CALL, "fabsf({0})"),
             array=lambda xp, a: xp.abs(a),
             derivative=lambda g, out, a: (where(less(a, FLOAT_ZERO), neg(g), g),), bounds=_absolute,
             what="the magnitude"),
    Operator(name="exp", typing=floats(1), cuda=as_float("expf({0})"), array=lambda xp, a: xp.exp(a),
             derivative=lambda g, out, a: (mul(g, out),), bounds=unbounded(FLOAT), what="e to the power x"),
    Operator(name="exp2", typing=floats(1), cuda=as_float("exp2f({0})"), array=lambda xp, a: xp.exp2(a),
             derivative=lambda g, out, a: (mul(mul(g, out), LN2),), bounds=unbounded(FLOAT), what="2 to the power x"),
    Operator(name="log", typing=floats(1), cuda=as_float("logf({0})"), array=lambda xp, a: xp.log(a),
             derivative=lambda g, out, a: (div(g, a),), bounds=unbounded(FLOAT), what="the natural logarithm"),
    Operator(name="log2", typing=floats(1), cuda=as_float("log2f({0})"), array=lambda xp, a: xp.log2(a),
             derivative=lambda g, out, a: (div(g, mul(a, LN2)),), bounds=unbounded(FLOAT),
             what="the logarithm to base 2"),
    Operator(name="sqrt", typing=floats(1), cuda=as_float("sqrtf({0})"), array=lambda xp, a: xp.sqrt(a),
             derivative=lambda g, out, a: (div(g, mul(constant(2.0), out)),), bounds=unbounded(FLOAT),
             what="the square root"),
    Operator(name="rsqrt", typing=floats(1), cuda=as_float("rsqrtf({0})"), array=lambda xp, a: 1.0 / xp.sqrt(a),
             derivative=lambda g, out, a: (neg(div(mul(g, out), mul(constant(2.0), a))),), bounds=unbounded(FLOAT),
             what="1 / sqrt(x)"),
    Operator(name="tanh", typing=floats(1), cuda=as_float("tanhf({0})"), array=lambda xp, a: xp.tanh(a),
             derivative=lambda g, out, a: (mul(g, sub(FLOAT_ONE, mul(out, out))),), bounds=unbounded(FLOAT),
             what="the hyperbolic tangent"),
    Operator(name="sigmoid", typing=floats(1), cuda=as_float("1.0f / (1.0f + expf(-({0})))", MULTIPLY),
             array=lambda xp, a: 0.5 * (1.0 + xp.tanh(0.5 * a)),
             derivative=lambda g, out, a: (mul(g, mul(out, sub(FLOAT_ONE, out))),), bounds=unbounded(FLOAT),
             what="1 / (1 + exp(-x))"),
    Operator(name="sin", typing=floats(1), cuda=as_float("sinf({0})"), array=lambda xp, a: xp.sin(a),
             derivative=lambda g, out, a: (mul(g, apply("cos", a)),), bounds=unbounded(FLOAT), what="the sine"),
    Operator(name="cos", typing=floats(1), cuda=as_float("cosf({0})"), array=lambda xp, a: xp.cos(a),
             derivative=lambda g, out, a: (neg(mul(g, apply("sin", a))),), bounds=unbounded(FLOAT), what="the cosine"),
    Operator(name="pow", typing=floats(2), cuda=as_float("powf({0}, {1})"), array=lambda xp, a, b: xp.pow(a, b),
             derivative=_of_power, bounds=unbounded(FLOAT), what="x to the power y"),
    Operator(name="floor", typing=floats(1), cuda=as_float("floorf({0})"), array=lambda xp, a: xp.floor(a),
             derivative=discrete(1), bounds=unbounded(FLOAT), what="the largest whole number up to x, as a float"),
    Operator(name="ceil", typing=floats(1), cuda=as_float("ceilf({0})"), array=lambda xp, a: xp.ceil(a),
             derivative=discrete(1), bounds=unbounded(FLOAT), what="the smallest whole number from x, as a float"),
    _compare("lt", "<", lambda xp, a, b: a < b, lambda a, b: Interval(less(a.hi, b.lo), less(a.lo, b.hi))),
    _compare("le", "<=", lambda xp, a, b: a <= b,
             lambda a, b: Interval(less_equal(a.hi, b.lo), less_equal(a.lo, b.hi))),
    _compare("gt", ">", lambda xp, a, b: a > b, lambda a, b: Interval(less(b.hi, a.lo), less(b.lo, a.hi))),
    _compare("ge", ">=", lambda xp, a, b: a >= b,
             lambda a, b: Interval(less_equal(b.hi, a.lo), less_equal(b.lo, a.hi))),
    _compare("eq", "==", lambda xp, a, b: a == b, _equality, EQUAL),
    _compare("ne", "!=", lambda xp, a, b: a != b, _inequality, EQUAL),
    Operator(name="and", infix=Infix("and", 2), typing=truth_values(2), cuda=as_bool("{0} && {1}", AND),
             array=lambda xp, a, b: xp.logical_and(a, b), derivative=discrete(2), bounds=increasing("and")),
    Operator(name="or", infix=Infix("or", 1), typing=truth_values(2), cuda=as_bool("{0} || {1}", OR),
             array=lambda xp, a, b: xp.logical_or(a, b), derivative=discrete(2), bounds=increasing("or")),
    Operator(name="not", infix=Infix("not", 3), typing=truth_values(1), cuda=as_bool("!{0}", UNARY),
             array=lambda xp, a: xp.logical_not(a), derivative=discrete(1),
             bounds=lambda a: Interval(negation(a.hi), negation(a.lo))),
    Operator(name="where", typing=selection,
             cuda=dict.fromkeys((INT, FLOAT, BOOL), Spelling("{0} ? {1} : {2}", CONDITIONAL)),
             array=lambda xp, c, a, b: xp.where(c, a, b),
             derivative=lambda g, out, c, a, b: (None, where(c, g, FLOAT_ZERO), where(c, FLOAT_ZERO, g)),
             bounds=_selected, what="the second operand where the first is true, else the third"),
    Operator(name="float", typing=conversion(FLOAT), cuda=dict.fromkeys((INT, FLOAT, BOOL), Spelling("float({0})", CALL)),
             array=lambda xp, a: to_float(xp, a), derivative=discrete(1),
             bounds=lambda a: Interval(apply("float", a.lo), apply("float", a.hi)), what="a number as a float"),
    Operator(name="int", typing=conversion(INT), cuda=dict.fromkeys((INT, FLOAT, BOOL), Spelling("int({0})", CALL)),
             array=lambda xp, a: to_integer(xp, a), derivative=discrete(1),
             bounds=lambda a: Interval(constant(-(2**31)), constant(2**31 - 1)) if a.lo.type is FLOAT
             else Interval(apply("int", a.lo), apply("int", a.hi)),
             what="a number as an integer, rounded toward zero and kept within 32 bits"),
)
# fmt: on


def to_float(xp: Any, a: Any) -> Any:
    """Integers and truth values as float64; floats as they are."""
    if xp is PYTHON or not hasattr(a, "dtype"):
        return float(a)
    if "float" in str(a.dtype):
        return a
    return a.astype("float64") if hasattr(a, "astype") else a.to(xp.float64)


def to_integer(xp: Any, a: Any) -> Any:
    """Rounded toward zero and clamped to 32 bits, as CUDA's conversion does; NaN becomes 0."""
    if xp is PYTHON:
        return 0 if a != a else int(max(min(float(a), 2.0**31 - 1), -(2.0**31))) if isinstance(a, float) else int(a)
    if not hasattr(a, "dtype"):
        return to_integer(PYTHON, a)
    kind = str(a.dtype)
    if "float" in kind:
        a = xp.where(a == a, a, 0.0 * xp.ones_like(a))
        a = xp.clip(a, -(2.0**31), 2.0**31 - 1)
    return a.astype("int64") if hasattr(a, "astype") else a.to(xp.int64)


TABLE: dict[str, Operator] = {row.name: row for row in ROWS}
FUNCTIONS: frozenset[str] = frozenset(row.name for row in ROWS if row.infix is None)  # called by name in the language
