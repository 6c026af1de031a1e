"""Operators and their application; `attngen.spec.operators` has the table."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from attngen.spec.expr import Const, Expr, ExpressionError, Scalar, Type, constant, intern_apply

BOOL, INT, FLOAT = Type.BOOL, Type.INT, Type.FLOAT


class Interval(NamedTuple):
    """The values of an expression: `lo <= value <= hi`. For a truth value, `lo` means "always" and `hi` "sometimes"."""

    lo: Expr
    hi: Expr


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

EVERY_VALUE: dict[Type, Interval] = {
    BOOL: Interval(constant(False), constant(True)),
    INT: Interval(constant(INT64_MIN), constant(INT64_MAX)),
    FLOAT: Interval(constant(-math.inf), constant(math.inf)),
}


class Spelling(NamedTuple):
    """The CUDA text of a row: `{0}` is the first operand, `precedence` that of the outermost C operator."""

    text: str
    precedence: int


class Infix(NamedTuple):
    """The notation of a row in the language: symbol and precedence (`not` and unary minus: prefix)."""

    symbol: str
    precedence: int


CALL, UNARY, MULTIPLY, ADD, COMPARE, EQUAL = 16, 15, 13, 12, 10, 9  # precedence in C
BIT_AND, BIT_XOR, BIT_OR, AND, OR, CONDITIONAL = 8, 7, 6, 5, 4, 2

Typing = Callable[[str, tuple[Type, ...]], tuple[tuple[Type, ...], Type]]
Derivative = Callable[..., tuple[Expr | None, ...]]
Bounds = Callable[..., Interval]
Simpler = Callable[..., Expr | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row. `nonnegative` is a shorter CUDA text for operands that are not negative. `helpers` are device functions that the
    CUDA text calls (`templates/parts/NAME.cuh`). `fast` is a primitive that approximates the operator with an error that
    results of 16 bits do not show, `rough` one with an error that `precision high` allows. `fast` takes a factor of its operand
    too; `fast_of_two` replaces two operands by their `fast` results at a lower cost. All results are `within` this range.
    `simpler` is a simpler expression for these operands, by an identity that holds for every value, or None. `cost` is how long
    compilers take for one, see `attngen.spec.cost`."""

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
    simpler: Simpler = lambda *operands: None
    cost: int = 1
    what: str = ""


TABLE: dict[str, Operator] = {}  # filled by attngen.spec.operators, its only source


def is_comparison(op: str) -> bool:
    """Whether `op` has the precedence of comparisons, which cannot be chained."""
    infix, like = TABLE[op].infix, TABLE["lt"].infix
    return infix is not None and like is not None and infix.precedence == like.precedence


def arity(op: str) -> int:
    """The number of operands of `op`."""
    for count in (1, 2, 3):
        for types in ((FLOAT,) * count, (BOOL,) + (FLOAT,) * (count - 1), (INT,) * count):
            with suppress(ExpressionError):
                TABLE[op].typing(op, types)
                return count
    raise AssertionError(op)


def apply(op: str, *args: Expr) -> Expr:
    """`op` applied to `args`: converts types, folds constants, simplifies.

    Raises ExpressionError if the operands are not valid for `op`. The size of what is derived from a spec is not limited here:
    it follows from that of the spec, whose expressions are `within_limits`.
    """
    row = TABLE[op]
    wanted, result = row.typing(row.infix.symbol if row.infix else op, tuple([a.type for a in args]))
    args = tuple([apply("float", a) if want is FLOAT and a.type is INT else a for a, want in zip(args, wanted, strict=True)])
    if all(isinstance(a, Const) for a in args):
        folded = _fold(row, result, tuple([a.value for a in args if isinstance(a, Const)]))
        if folded is not None:
            return folded
    if op in ("floordiv", "mod") and args[1] is ZERO:
        raise ExpressionError(f"`{row.infix.symbol if row.infix else op}` by zero", "divide by another number")
    simpler = row.simpler(*args)
    if simpler is not None:
        return simpler
    return intern_apply(op, result, args)


def _fold(row: Operator, result: Type, values: tuple[Scalar, ...]) -> Const | None:
    if row.name in ("floordiv", "mod") and values[1] == 0:
        raise ExpressionError(f"`{row.infix.symbol if row.infix else row.name}` by zero")
    try:
        value = row.array(PYTHON, *values)
    except (OverflowError, ValueError, ZeroDivisionError):
        return None  # left to the generated code, which follows IEEE arithmetic
    if isinstance(value, complex):  # Python's root of a negative number; IEEE's is NaN
        return None
    if result is INT:
        if not INT64_MIN <= value <= INT64_MAX:
            raise ExpressionError("an integer constant does not fit 64 bits", "use a float")
        return constant(int(value))
    return constant(bool(value)) if result is BOOL else constant(float(value))


def _divide(a: float, b: float) -> float:
    """a / b as IEEE arithmetic defines it; Python raises an exception if b is 0."""
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


# The functions of numpy that rows use, on Python's numbers: exact integers, for folding constants.
PYTHON = SimpleNamespace(
    exp=math.exp, exp2=lambda x: float(2.0**x), log=math.log, log2=math.log2, sqrt=math.sqrt, tanh=math.tanh, sin=math.sin,
    cos=math.cos, arctan2=math.atan2, erf=math.erf, log1p=math.log1p,
    floor=math.floor, ceil=math.ceil, pow=pow, abs=abs, fmin=min, fmax=max, divide=_divide,
    floor_divide=operator.floordiv, remainder=operator.mod, logical_and=lambda a, b: a and b, logical_or=lambda a, b: a or b,
    logical_not=operator.not_, where=lambda c, a, b: a if c else b,
)  # fmt: skip
ZERO, ONE, FLOAT_ONE = constant(0), constant(1), constant(1.0)
FLOAT_ZERO = constant(0.0)
TRUE, FALSE = constant(True), constant(False)

neg, negation = partial(apply, "neg"), partial(apply, "not")
add, sub, mul, div, floordiv = (partial(apply, op) for op in ("add", "sub", "mul", "div", "floordiv"))
minimum, maximum, where = (partial(apply, op) for op in ("min", "max", "where"))
less, less_equal, equal = (partial(apply, op) for op in ("lt", "le", "eq"))
both, either = partial(apply, "and"), partial(apply, "or")
