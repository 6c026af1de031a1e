"""What an operator is, and how one is applied: the machinery under the table of `attngen.spec.operators`."""

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
    functions that the CUDA text calls (`templates/parts/NAME.cuh`). `fast` and `rough` are primitives that
    approximate it: so well that results of 16 bits do not show it, and as `precision high` allows. `fast` takes a factor of its
    operand too; `fast_of_two` replaces two operands by what `fast` gives of each, for less. All results lie `within`."""

    name: str
    typing: Typing
    cuda: dict[Type, Spelling]
    array: Callable[..., Any]
    derivative: Derivative
    bounds: Bounds
    infix: Infix | None = None
    nonnegative: Spelling | None = None
    helpers: tuple[str, ...] = ()
    fast: str = ""
    rough: str = ""
    fast_of_two: str = ""
    within: tuple[float, float] | None = None
    what: str = ""


TABLE: dict[str, Operator] = {}  # filled by attngen.spec.operators, its only source


def is_comparison(op: str) -> bool:
    """Whether `op` binds as the comparisons do: such operators cannot be chained."""
    infix, like = TABLE[op].infix, TABLE["lt"].infix
    return infix is not None and like is not None and infix.precedence == like.precedence


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
    if op in ("floordiv", "mod") and args[1] is ZERO:
        raise ExpressionError(f"`{row.infix.symbol if row.infix else op}` by zero", "divide by another number")
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
    floor, ceil = math.floor, math.ceil

    @staticmethod
    def divide(a: float, b: float) -> float:
        if b == 0:  # as IEEE arithmetic has it, where Python raises
            return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
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
