"""The table of operators: the only place where an operator exists.

A row says, for one operator:

- **types**: the types of its operands and its result;
- **cuda**: its text in generated CUDA, by the type of its operands;
- **array**: its value on arrays, as a function of the namespace (`numpy` or `torch`) and the operands;
- **derivative**: reverse mode: the gradient of every operand, from the gradient of the result, the result and the operands;
- **bounds**: interval arithmetic: an interval of the result, from intervals of the operands.

Derivatives and bounds are expressions, so one rule serves generated CUDA, the oracle and the tests. These columns are required:
`discrete` and `unbounded` state explicitly that one does not apply. The others (`Operator`) are left out where there is nothing
to say.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from attngen.spec.derivative_rules import LN2, TWO_OVER_SQRT_PI, discrete, of_angle, of_extremum, of_magnitude, of_power
from attngen.spec.expr import Type, constant
from attngen.spec.interval_rules import (
    above,
    absolute,
    at_most,
    below,
    bits_of_both,
    bits_of_either,
    bits_of_one,
    by_type,
    equality,
    increasing,
    inequality,
    of_ends,
    product,
    quotient,
    remainder,
    selected,
    truncated,
    unbounded,
)
from attngen.spec.operator import (
    ADD,
    AND,
    BIT_AND,
    BIT_OR,
    BIT_XOR,
    BOOL,
    CALL,
    COMPARE,
    CONDITIONAL,
    EQUAL,
    FLOAT,
    FLOAT_ONE,
    FLOAT_ZERO,
    INT,
    MULTIPLY,
    ONE,
    OR,
    PYTHON,
    TABLE,
    UNARY,
    ZERO,
    Bounds,
    Infix,
    Interval,
    Operator,
    Spelling,
    add,
    apply,
    div,
    mul,
    neg,
    negation,
    sub,
    where,
)
from attngen.spec.simplification_rules import (
    choice,
    conversion_from,
    extremum,
    involution,
    neutral,
    of_truth_values,
    remainder_of_one,
)
from attngen.spec.typing_rules import comparison, conversion, floats, integers, numbers, selection, truth_values


def both_types(text: str, precedence: int, float_text: str | None = None) -> dict[Type, Spelling]:
    return {INT: Spelling(text, precedence), FLOAT: Spelling(float_text or text, precedence)}


def as_float(text: str, precedence: int = CALL) -> dict[Type, Spelling]:
    return {FLOAT: Spelling(text, precedence)}


def as_bool(text: str, precedence: int) -> dict[Type, Spelling]:
    return {BOOL: Spelling(text, precedence)}


def _compare(name: str, symbol: str, array: Callable[..., object], bounds: Bounds, precedence: int = COMPARE) -> Operator:
    spelling = Spelling(f"{{0}} {symbol} {{1}}", precedence)
    cuda = dict.fromkeys((INT, FLOAT, BOOL), spelling)
    return Operator(name=name, typing=comparison, cuda=cuda, array=array, derivative=discrete(2), bounds=bounds,
                    infix=Infix(symbol, 4), what=f"true if a {symbol} b")  # fmt: skip


# fmt: off
ROWS: tuple[Operator, ...] = (
    Operator(name="add", infix=Infix("+", 5), typing=numbers(2), cuda=both_types("{0} + {1}", ADD),
             array=lambda xp, a, b: a + b, derivative=lambda g, out, a, b: (g, g), 
             bounds=by_type(increasing("add"), of_ends(operator.add)),
             simpler=neutral(first=(ZERO,), last=(ZERO,)), what="the sum"),
    Operator(name="sub", infix=Infix("-", 5), typing=numbers(2), cuda=both_types("{0} - {1}", ADD),
             array=lambda xp, a, b: a - b, derivative=lambda g, out, a, b: (g, neg(g)),
             bounds=by_type(lambda a, b: Interval(sub(a.lo, b.hi), sub(a.hi, b.lo)), of_ends(operator.sub)),
             simpler=neutral(last=(ZERO,)), what="the difference"),
    Operator(name="mul", infix=Infix("*", 6), typing=numbers(2), cuda=both_types("{0} * {1}", MULTIPLY),
             array=lambda xp, a, b: a * b, derivative=lambda g, out, a, b: (mul(g, b), mul(g, a)),
             bounds=by_type(product, of_ends(operator.mul)),
             simpler=neutral(first=(ONE, FLOAT_ONE), last=(ONE, FLOAT_ONE)), what="the product"),
    Operator(name="div", infix=Infix("/", 6), typing=floats(2), cuda=as_float("{0} / {1}", MULTIPLY),
             array=lambda xp, a, b: xp.divide(a, b),
             derivative=lambda g, out, a, b: (div(g, b), neg(div(mul(g, out), b))),
             bounds=of_ends(operator.truediv, lambda a, b: b[0] > 0 or b[1] < 0),
             simpler=neutral(last=(FLOAT_ONE,)), cost=20, what="the quotient as a float: 7 / 2 is 3.5"),
    Operator(name="floordiv", infix=Infix("//", 6), typing=integers, cuda={INT: Spelling("floor_div({0}, {1})", CALL)},
             nonnegative=Spelling("{0} / {1}", MULTIPLY), helpers=("floor_div",),
             array=lambda xp, a, b: xp.floor_divide(a, b), derivative=discrete(2), bounds=quotient,
             simpler=neutral(last=(ONE,)), cost=35, what="the quotient of integers, rounded down"),
    Operator(name="mod", infix=Infix("%", 6), typing=integers, cuda={INT: Spelling("floor_mod({0}, {1})", CALL)},
             nonnegative=Spelling("{0} % {1}", MULTIPLY), helpers=("floor_mod",),
             array=lambda xp, a, b: xp.remainder(a, b), derivative=discrete(2), bounds=remainder,
             simpler=remainder_of_one, cost=35, what="the remainder of `//`: it has the divisor's sign"),
    Operator(name="neg", infix=Infix("-", 7), typing=numbers(1), cuda=both_types("-{0}", UNARY),
             array=lambda xp, a: -a, derivative=lambda g, out, a: (neg(g),),
             bounds=lambda a: Interval(neg(a.hi), neg(a.lo)),
             simpler=involution("neg"), what="the number with the other sign"),
    Operator(name="min", typing=numbers(2), cuda=both_types("min({0}, {1})", CALL, "fminf({0}, {1})"),
             array=lambda xp, a, b: xp.fmin(a, b), derivative=of_extremum, bounds=increasing("min"),
             simpler=extremum("min"), what="the smaller of two numbers"),
    Operator(name="max", typing=numbers(2), cuda=both_types("max({0}, {1})", CALL, "fmaxf({0}, {1})"),
             array=lambda xp, a, b: xp.fmax(a, b), derivative=of_extremum, bounds=increasing("max"),
             simpler=extremum("max"), what="the larger of two numbers"),
    Operator(name="abs", typing=numbers(1), cuda=both_types("abs({0})", CALL, "fabsf({0})"),
             array=lambda xp, a: xp.abs(a), derivative=of_magnitude, bounds=absolute,
             what="the magnitude"),
    Operator(name="exp", typing=floats(1), cuda=as_float("expf({0})"), array=lambda xp, a: xp.exp(a),
             derivative=lambda g, out, a: (mul(g, out),), bounds=of_ends(math.exp), cost=7, what="e to the power x"),
    Operator(name="exp2", typing=floats(1), cuda=as_float("exp2f({0})"), array=lambda xp, a: xp.exp2(a),
             derivative=lambda g, out, a: (mul(mul(g, out), LN2),), bounds=of_ends(lambda x: 2.0**x), cost=2,
             what="2 to the power x"),
    Operator(name="log", typing=floats(1), cuda=as_float("logf({0})"), array=lambda xp, a: xp.log(a),
             derivative=lambda g, out, a: (div(g, a),), bounds=of_ends(math.log, above(0.0)), cost=30,
             what="the natural logarithm"),
    Operator(name="log2", typing=floats(1), cuda=as_float("log2f({0})"), array=lambda xp, a: xp.log2(a),
             derivative=lambda g, out, a: (div(g, mul(a, LN2)),), bounds=of_ends(math.log2, above(0.0)),
             cost=30, what="the logarithm to base 2"),
    Operator(name="sqrt", typing=floats(1), cuda=as_float("sqrtf({0})"), array=lambda xp, a: xp.sqrt(a),
             derivative=lambda g, out, a: (div(g, mul(constant(2.0), out)),), bounds=of_ends(math.sqrt),
             cost=20, what="the square root"),
    Operator(name="rsqrt", typing=floats(1), cuda=as_float("rsqrtf({0})"), array=lambda xp, a: 1.0 / xp.sqrt(a),
             derivative=lambda g, out, a: (neg(div(mul(g, out), mul(constant(2.0), a))),),
             bounds=of_ends(lambda x: x**-0.5, above(0.0)),
             cost=5, what="1 / sqrt(x)"),
    Operator(name="tanh", typing=floats(1), cuda=as_float("tanhf({0})"), array=lambda xp, a: xp.tanh(a),
             derivative=lambda g, out, a: (mul(g, sub(FLOAT_ONE, mul(out, out))),), bounds=unbounded(FLOAT),
             fast="fast_tanh", rough="rough_tanh", fast_of_two="fast_tanh_of_two", within=(-1.0, 1.0),
             cost=10, what="the hyperbolic tangent"),
    Operator(name="sigmoid", typing=floats(1), cuda=as_float("1.0f / (1.0f + expf(-({0})))", MULTIPLY),
             array=lambda xp, a: 0.5 * (1.0 + xp.tanh(0.5 * a)),
             derivative=lambda g, out, a: (mul(g, mul(out, sub(FLOAT_ONE, out))),), bounds=unbounded(FLOAT),
             within=(0.0, 1.0), cost=30, what="1 / (1 + exp(-x))"),
    Operator(name="sin", typing=floats(1), cuda=as_float("sinf({0})"), array=lambda xp, a: xp.sin(a),
             derivative=lambda g, out, a: (mul(g, apply("cos", a)),), bounds=unbounded(FLOAT), within=(-1.0, 1.0),
             cost=220, what="the sine"),
    Operator(name="cos", typing=floats(1), cuda=as_float("cosf({0})"), array=lambda xp, a: xp.cos(a),
             derivative=lambda g, out, a: (neg(mul(g, apply("sin", a))),), bounds=unbounded(FLOAT), within=(-1.0, 1.0),
             cost=220, what="the cosine"),
    Operator(name="atan2", typing=floats(2), cuda=as_float("atan2f({0}, {1})"), array=lambda xp, a, b: xp.arctan2(a, b),
             derivative=of_angle, bounds=unbounded(FLOAT), cost=110,
             what="the angle of the point (y, x), from -pi to pi: atan(x / y)"),
    Operator(name="pow", typing=floats(2), cuda=as_float("powf({0}, {1})"), array=lambda xp, a, b: xp.pow(a, b),
             derivative=of_power, bounds=unbounded(FLOAT), cost=120, what="x to the power y"),
    Operator(name="floor", typing=floats(1), cuda=as_float("floorf({0})"), array=lambda xp, a: xp.floor(a),
             derivative=discrete(1), bounds=of_ends(math.floor, exact=True),
             what="the largest whole number that is at most x, as a float"),
    Operator(name="ceil", typing=floats(1), cuda=as_float("ceilf({0})"), array=lambda xp, a: xp.ceil(a),
             derivative=discrete(1), bounds=of_ends(math.ceil, exact=True),
             what="the smallest whole number that is at least x, as a float"),
    Operator(name="erf", typing=floats(1), cuda=as_float("erff({0})"), array=lambda xp, a: error_function(xp, a),
             derivative=lambda g, out, a: (mul(g, mul(TWO_OVER_SQRT_PI, apply("exp", neg(mul(a, a))))),),
             bounds=unbounded(FLOAT), within=(-1.0, 1.0), cost=20, what="the error function"),
    Operator(name="log1p", typing=floats(1), cuda=as_float("log1pf({0})"), array=lambda xp, a: xp.log1p(a),
             derivative=lambda g, out, a: (div(g, add(FLOAT_ONE, a)),), bounds=of_ends(math.log1p, above(-1.0)),
             cost=40, what="the natural logarithm of 1 + x, accurate for small x"),
    Operator(name="bit_and", typing=integers, cuda={INT: Spelling("{0} & {1}", BIT_AND)}, array=lambda xp, a, b: a & b,
             derivative=discrete(2), bounds=bits_of_both, what="the bits that two integers share"),
    Operator(name="bit_or", typing=integers, cuda={INT: Spelling("{0} | {1}", BIT_OR)}, array=lambda xp, a, b: a | b,
             derivative=discrete(2), bounds=bits_of_either, what="the bits of one or both of two integers"),
    Operator(name="bit_xor", typing=integers, cuda={INT: Spelling("{0} ^ {1}", BIT_XOR)}, array=lambda xp, a, b: a ^ b,
             derivative=discrete(2), bounds=bits_of_one, what="the bits of one of two integers but not of both"),
    _compare("lt", "<", lambda xp, a, b: a < b, below),
    _compare("le", "<=", lambda xp, a, b: a <= b, at_most),
    _compare("gt", ">", lambda xp, a, b: a > b, lambda a, b: below(b, a)),
    _compare("ge", ">=", lambda xp, a, b: a >= b, lambda a, b: at_most(b, a)),
    _compare("eq", "==", lambda xp, a, b: a == b, equality, EQUAL),
    _compare("ne", "!=", lambda xp, a, b: a != b, inequality, EQUAL),
    Operator(name="and", infix=Infix("and", 2), typing=truth_values(2), cuda=as_bool("{0} && {1}", AND),
             array=lambda xp, a, b: xp.logical_and(a, b), derivative=discrete(2), bounds=increasing("and"),
             simpler=of_truth_values(neutral=True), what="true if both are true"),
    Operator(name="or", infix=Infix("or", 1), typing=truth_values(2), cuda=as_bool("{0} || {1}", OR),
             array=lambda xp, a, b: xp.logical_or(a, b), derivative=discrete(2), bounds=increasing("or"),
             simpler=of_truth_values(neutral=False), what="true if one of them is true"),
    Operator(name="not", infix=Infix("not", 3), typing=truth_values(1), cuda=as_bool("!{0}", UNARY),
             array=lambda xp, a: xp.logical_not(a), derivative=discrete(1),
             bounds=lambda a: Interval(negation(a.hi), negation(a.lo)),
             simpler=involution("not"), what="true if it is false"),
    Operator(name="where", typing=selection,
             cuda=dict.fromkeys((INT, FLOAT, BOOL), Spelling("{0} ? {1} : {2}", CONDITIONAL)),
             array=lambda xp, c, a, b: xp.where(c, a, b),
             derivative=lambda g, out, c, a, b: (None, where(c, g, FLOAT_ZERO), where(c, FLOAT_ZERO, g)),
             bounds=selected, simpler=choice, what="a if c is true, else b"),
    Operator(name="float", typing=conversion(FLOAT), cuda=dict.fromkeys((INT, FLOAT, BOOL), Spelling("float({0})", CALL)),
             array=lambda xp, a: to_float(xp, a), derivative=discrete(1),
             bounds=lambda a: Interval(apply("float", a.lo), apply("float", a.hi)), simpler=conversion_from(FLOAT),
             what="a number as a float"),
    Operator(name="int", typing=conversion(INT),  # C++ has no value for the conversion of NaN or of what does not fit
             cuda={FLOAT: Spelling("__float2int_rz({0})", CALL), BOOL: Spelling("int({0})", CALL)},
             array=lambda xp, a: to_integer(xp, a), derivative=discrete(1),
             bounds=truncated,
             simpler=conversion_from(INT), what="a number as an integer, rounded toward zero and kept within 32 bits"),
)
# fmt: on


def error_function(xp: Any, a: Any) -> Any:
    """erf of arrays; numpy has none."""
    if hasattr(xp, "erf"):
        return xp.erf(a)
    return xp.vectorize(math.erf, otypes=[float])(a)


def to_float(xp: Any, a: Any) -> Any:
    """Integers and truth values as the namespace's float64, which may be fp32; floats as they are."""
    if xp is PYTHON or not hasattr(a, "dtype"):
        return float(a)
    if "float" in str(a.dtype):
        return a
    return a.astype(xp.float64) if hasattr(a, "astype") else a.to(xp.float64)


def to_integer(xp: Any, a: Any) -> Any:
    """Rounded toward zero and clamped to 32 bits, as CUDA's conversion does; NaN becomes 0."""
    if xp is PYTHON:
        return 0 if a != a else int(max(min(float(a), 2.0**31 - 1), -(2.0**31))) if isinstance(a, float) else int(a)
    if not hasattr(a, "dtype"):
        return to_integer(PYTHON, a)
    if "float" in str(a.dtype):
        a = a.astype("float64") if hasattr(a, "astype") else a.to(xp.float64)
        a = xp.where(a == a, a, 0.0 * xp.ones_like(a))
        a = xp.clip(a, -(2.0**31), 2.0**31)  # the namespace's float64 may be fp32, which does not have 2^31 - 1
        return xp.clip(a.astype("int64") if hasattr(a, "astype") else a.to(xp.int64), -(2**31), 2**31 - 1)
    return a.astype("int64") if hasattr(a, "astype") else a.to(xp.int64)


TABLE.update({row.name: row for row in ROWS})
FUNCTIONS: frozenset[str] = frozenset(row.name for row in ROWS if row.infix is None)  # called by name in the language
