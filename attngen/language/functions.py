"""The functions and operators of Python, numpy and torch that expressions have, each once: what it means, by rows of the
operator table. Functions that are traced and ATen graphs of torch find it here by its name.

A function maps operands, which are expressions, to an expression. Types promote as torch promotes them: a truth value among
numbers is 0 or 1, an integer among floats is a float. Raises ExpressionError for operands that it does not take, TypeError for
arguments that it does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

from attngen.spec.attention import INDICES, SIZES
from attngen.spec.bounds import ranges
from attngen.spec.expr import MAX_LENGTH, Const, Expr, ExpressionError, Type, constant
from attngen.spec.operator import (
    FLOAT_ONE,
    FLOAT_ZERO,
    ONE,
    ZERO,
    add,
    apply,
    div,
    less,
    less_equal,
    maximum,
    minimum,
    mul,
    neg,
    sub,
    where,
)
from attngen.spec.operators import FUNCTIONS as ROWS

Function = Callable[..., Expr]
WIDTH = list(Type).index  # rank of a type: the widest of some operands is their common type
HALF, TWO, MINUS_ONE = constant(0.5), constant(2.0), constant(-1.0)
LEAK, LINEAR_FROM = constant(0.01), constant(20.0)  # torch's defaults of leaky_relu and softplus


def cast(x: Expr, kind: Type) -> Expr:
    """`x` converted as numpy and torch do: true unless 0 as bool, toward zero as int."""
    if x.type is kind:
        return x
    return apply("ne", x, ZERO) if kind is Type.BOOL else apply(str(kind), x)


def common(*xs: Expr, least: Type = Type.BOOL) -> list[Expr]:
    """Operands converted to the widest of their types, and of `least`."""
    kind = max((least, *(x.type for x in xs)), key=WIDTH)
    return [cast(x, kind) for x in xs]


def _of_common(op: str, of_truth: str | None = None) -> Function:
    """`op` of operands of one type; `of_truth` instead if they are truth values."""

    def meant(a: Expr, b: Expr) -> Expr:
        a, b = common(a, b)
        return apply(of_truth if of_truth is not None and a.type is Type.BOOL else op, a, b)

    return meant


def _of_numbers(op: str) -> Function:
    return lambda *xs: apply(op, *(common(x, least=Type.INT)[0] for x in xs))


def _of_truth(op: str) -> Function:
    return lambda *xs: apply(op, *(cast(x, Type.BOOL) for x in xs))


def _scaled(op: str) -> Function:
    meant = _of_common(op, "or" if op == "add" else None)
    return lambda a, b, *, alpha=ONE: meant(a, b if alpha is ONE else mul(*common(b, alpha)))


# --- division: `divided` is how a quotient or remainder of integers is made -------------------------------------------

Divided = Callable[[str, Expr, Expr], Expr]


def _truncated(a: Expr) -> Expr:
    return where(less(a, FLOAT_ZERO), apply("ceil", a), apply("floor", a))


def _is_negative_never(x: Expr) -> bool:
    names = dict.fromkeys(INDICES, (0, MAX_LENGTH - 1)) | dict.fromkeys(SIZES, (0, MAX_LENGTH))
    return ranges(x, names, {})[x][0] >= 0


def _floor_divide(a: Expr, b: Expr, *, divided: Divided = apply) -> Expr:
    a, b = common(a, b, least=Type.INT)
    return apply("floor", div(a, b)) if a.type is Type.FLOAT else divided("floordiv", a, b)


def _truncating_divide(a: Expr, b: Expr, divided: Divided) -> Expr:
    a, b = common(a, b, least=Type.INT)
    if a.type is Type.FLOAT:
        return _truncated(div(a, b))
    if _is_negative_never(a) and _is_negative_never(b):
        return divided("floordiv", a, b)
    size = divided("floordiv", apply("abs", a), apply("abs", b))
    return where(apply("ne", less(a, ZERO), less(b, ZERO)), neg(size), size)


def _div(a: Expr, b: Expr, *, rounding_mode: str | None = None, divided: Divided = apply) -> Expr:
    if rounding_mode == "floor":
        return _floor_divide(a, b, divided=divided)
    if rounding_mode == "trunc":
        return _truncating_divide(a, b, divided)
    if rounding_mode is not None:
        raise ExpressionError(f"div has no rounding_mode {rounding_mode!r}", 'write "floor" or "trunc"')
    return _of_numbers("div")(a, b)


def _remainder(a: Expr, b: Expr, *, divided: Divided = apply) -> Expr:
    a, b = common(a, b, least=Type.INT)
    return sub(a, mul(b, apply("floor", div(a, b)))) if a.type is Type.FLOAT else divided("mod", a, b)


def _fmod(a: Expr, b: Expr, *, divided: Divided = apply) -> Expr:
    a, b = common(a, b, least=Type.INT)
    return sub(a, mul(b, _truncating_divide(a, b, divided)))


DIVISIONS = frozenset(("div", "floor_divide", "remainder", "fmod"))  # take `divided`


# --- powers, rounding, and functions of several rows ------------------------------------------------------------------


def _power(a: Expr, b: Expr) -> Expr:
    """An exact product if the exponent is a whole number up to 8; else a float."""
    a, b = common(a, b, least=Type.INT)
    if isinstance(b, Const) and 0 <= b.value <= 8 and float(b.value).is_integer():
        return reduce(mul, [a] * int(b.value), cast(ONE, a.type))
    a, b = common(a, b, least=Type.FLOAT)
    if isinstance(a, Const) and a.value == 2.0:
        return apply("exp2", b)
    if isinstance(b, Const) and b.value in (0.5, -0.5):
        return apply("sqrt" if b.value > 0 else "rsqrt", a)
    return div(FLOAT_ONE, a) if isinstance(b, Const) and b.value == -1.0 else apply("pow", a, b)


def _rounding(function: Function) -> Function:
    """An integer is unchanged."""
    return lambda x: x if x.type is Type.INT else function(x)


def _round_half_to_even(x: Expr) -> Expr:
    up = apply("floor", add(x, HALF))
    tie = apply("eq", sub(up, x), HALF)
    odd = apply("ne", mul(TWO, apply("floor", mul(up, HALF))), up)
    return where(apply("and", tie, odd), sub(up, FLOAT_ONE), up)


def _of_float(function: Function) -> Function:
    return lambda x, *others, **options: function(cast(x, Type.FLOAT), *others, **options)


def _other_side(x: Expr) -> Expr:
    """sqrt(1 - x * x). Two roots, whose derivatives at 1 and -1 are infinite, where that of a product would be NaN."""
    return mul(apply("sqrt", sub(FLOAT_ONE, x)), apply("sqrt", add(FLOAT_ONE, x)))


def _asinh(x: Expr) -> Expr:
    """By the logarithm of a sum, in which nothing cancels."""
    sign = where(less(x, FLOAT_ZERO), MINUS_ONE, FLOAT_ONE)
    size = mul(sign, x)
    return mul(sign, apply("log", add(size, apply("sqrt", add(mul(size, size), FLOAT_ONE)))))


def _sign(x: Expr) -> Expr:
    zero, one = cast(ZERO, x.type), cast(ONE, x.type)
    return where(less(zero, x), one, where(less(x, zero), neg(one), zero))


def _relu(x: Expr) -> Expr:
    zero = cast(ZERO, x.type)
    return where(less(zero, x), x, zero)  # its derivative at 0 is 0, as torch's; that of max is 1


def _logsigmoid(x: Expr) -> Expr:
    """log(1 / (1 + exp(-x))) without exponentials of positive numbers. Its derivative at 0 is a half."""
    negative, positive = minimum(x, FLOAT_ZERO), maximum(x, FLOAT_ZERO)
    below = sub(negative, apply("log1p", apply("exp", negative)))
    return where(less(x, FLOAT_ZERO), below, neg(apply("log1p", apply("exp", neg(positive)))))


def _hardtanh(x: Expr, min_val: Expr = MINUS_ONE, max_val: Expr = FLOAT_ONE) -> Expr:
    """clamp, but its derivative at both ends is 0, as torch's."""
    if x.type is Type.FLOAT:
        low, high = cast(min_val, Type.FLOAT), cast(max_val, Type.FLOAT)
        x = where(less_equal(x, low), low, where(less_equal(high, x), high, x))
    return _clamp(x, min_val, max_val)


def _gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        inner = mul(constant(math.sqrt(2.0 / math.pi)), add(x, mul(constant(0.044715), mul(x, mul(x, x)))))
        return mul(mul(HALF, x), add(FLOAT_ONE, apply("tanh", inner)))
    return mul(mul(HALF, x), add(FLOAT_ONE, apply("erf", mul(x, constant(math.sqrt(0.5))))))


def _softplus(x: Expr, beta: Expr = FLOAT_ONE, threshold: Expr = LINEAR_FROM) -> Expr:
    beta, scaled = cast(beta, Type.FLOAT), mul(x, beta)
    return where(less(threshold, scaled), x, div(apply("log1p", apply("exp", minimum(scaled, threshold))), beta))


def _elu(x: Expr, alpha: Expr = FLOAT_ONE, scale: Expr = FLOAT_ONE, input_scale: Expr = FLOAT_ONE) -> Expr:
    below = mul(alpha, sub(apply("exp", mul(minimum(x, FLOAT_ZERO), input_scale)), FLOAT_ONE))
    return mul(scale, where(less(FLOAT_ZERO, x), x, below))


def _clamp(
    x: Expr, min: Expr | None = None, max: Expr | None = None, *, a_min: Expr | None = None, a_max: Expr | None = None
) -> Expr:
    low, high = min or a_min, max or a_max
    if low is None and high is None:
        raise ExpressionError("clamp needs a least or a greatest value")
    if low is not None:
        x = maximum(*common(x, low))
    return x if high is None else minimum(*common(x, high))


# --- comparisons and bits ---------------------------------------------------------------------------------------------


def _inverted(x: Expr) -> Expr:
    return apply("not", x) if x.type is Type.BOOL else sub(constant(-1), x)


def _shifted(op: str) -> Function:
    """Multiplied or divided by a power of two: the exponent is a constant up to 62, or an integer up to 31."""

    def meant(x: Expr, places: Expr) -> Expr:
        x, places = common(x, places, least=Type.INT)
        if x.type is Type.FLOAT:
            raise ExpressionError("a shift takes integers, not a float", "convert with int(...)")
        if isinstance(places, Const):
            if not 0 <= places.value <= 62:
                raise ExpressionError(f"a shift by {places.value}; expected 0 to 62", "multiply or divide (//) instead")
            return apply(op, x, constant(2 ** int(places.value)))
        for bit in range(5):
            is_set = apply("eq", apply("mod", apply("floordiv", places, constant(2**bit)), constant(2)), ONE)
            x = where(is_set, apply(op, x, constant(2 ** (2**bit))), x)
        return x

    return meant


def _where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return where(cast(condition, Type.BOOL), *common(a, b))


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
FUNCTIONS: dict[str, Function] = {
    **{row: _of_numbers(row) for row in ROWS - {"min", "max", "int", "float"}},  # numpy and torch reduce by min and max
    **{f"logical_{op}": _of_truth(op) for op in ("and", "or", "not")},
    **{op: lambda a, b, op=op: apply(op, *common(a, b, least=Type.INT)) for op in COMPARISONS[:4]},
    "eq": _of_common("eq"),
    "ne": _of_common("ne"),
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "rsub": lambda a, b, *, alpha=ONE: FUNCTIONS["sub"](b, a, alpha=alpha),
    "mul": _of_common("mul", "and"),
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmod": _fmod,
    "neg": partial(apply, "neg"),
    "abs": lambda x: x if x.type is Type.BOOL else apply("abs", x),
    "pow": _power,
    "square": lambda x: _power(x, TWO if x.type is Type.FLOAT else constant(2)),
    "reciprocal": lambda x: div(FLOAT_ONE, cast(x, Type.FLOAT)),
    "floor": _rounding(partial(apply, "floor")),
    "ceil": _rounding(partial(apply, "ceil")),
    "trunc": _rounding(_truncated),
    "round": _rounding(_round_half_to_even),
    "sign": _sign,
    "expm1": _of_float(lambda x: sub(apply("exp", x), FLOAT_ONE)),
    "log10": _of_float(lambda x: mul(apply("log", x), constant(1.0 / math.log(10.0)))),
    "erfc": _of_float(lambda x: sub(FLOAT_ONE, apply("erf", x))),
    "tan": _of_float(lambda x: div(apply("sin", x), apply("cos", x))),
    "atan": _of_float(lambda x: apply("atan2", x, FLOAT_ONE)),
    "asin": _of_float(lambda x: apply("atan2", x, _other_side(x))),
    "acos": _of_float(lambda x: apply("atan2", _other_side(x), x)),
    "sinh": _of_float(lambda x: mul(HALF, sub(apply("exp", x), apply("exp", neg(x))))),
    "cosh": _of_float(lambda x: mul(HALF, add(apply("exp", x), apply("exp", neg(x))))),
    "asinh": _of_float(_asinh),
    "acosh": _of_float(lambda x: apply("log", add(x, apply("sqrt", sub(mul(x, x), FLOAT_ONE))))),
    "atanh": _of_float(lambda x: mul(HALF, sub(apply("log1p", x), apply("log1p", neg(x))))),
    "hypot": _of_float(lambda x, y: apply("sqrt", add(mul(x, x), mul(y, y)))),
    "relu": _relu,
    "relu6": lambda x: _hardtanh(x, ZERO, constant(6)),
    "silu": lambda x: mul(x, apply("sigmoid", x)),
    "logsigmoid": _logsigmoid,
    "gelu": _of_float(_gelu),
    "softplus": _of_float(_softplus),
    "elu": _of_float(_elu),
    "leaky_relu": lambda x, negative_slope=LEAK: where(less(FLOAT_ZERO, x), x, mul(x, negative_slope)),
    "hardtanh": _hardtanh,
    "isnan": lambda x: apply("ne", x, x),
    "isinf": lambda x: apply("eq", apply("abs", x), constant(math.inf)),
    "isfinite": lambda x: apply("and", apply("eq", x, x), apply("ne", apply("abs", x), constant(math.inf))),
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "minimum": _of_common("min"),
    "maximum": _of_common("max"),
    "bitwise_and": _of_common("bit_and", "and"),
    "bitwise_or": _of_common("bit_or", "or"),
    "bitwise_xor": _of_common("bit_xor", "ne"),
    "bitwise_not": _inverted,
    "bitwise_left_shift": _shifted("mul"),
    "bitwise_right_shift": _shifted("floordiv"),
    "logical_xor": _of_truth("ne"),
    "where": _where,
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "fill": lambda x, value: cast(value, x.type),
    "zeros_like": lambda x: cast(ZERO, x.type),
    "ones_like": lambda x: cast(ONE, x.type),
    "full_like": lambda x, fill_value: fill_value,
}
# Other names of Python, numpy and torch.
ALIASES = {
    "absolute": "abs",
    "subtract": "sub",
    "multiply": "mul",
    **dict.fromkeys(("divide", "true_divide", "truediv"), "div"),
    "floordiv": "floor_divide",
    "mod": "remainder",
    "negative": "neg",
    "power": "pow",
    "expit": "sigmoid",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
    "fix": "trunc",
    **dict.fromkeys(("rint", "around"), "round"),
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    "sgn": "sign",
    **dict.fromkeys(("log_sigmoid", "log_sigmoid_forward"), "logsigmoid"),
    "clip": "clamp",
    "fmin": "minimum",
    "fmax": "maximum",
    **dict.fromkeys(("invert", "not"), "bitwise_not"),
    **{name: f"bitwise_{name}" for name in ("and", "or", "xor", "left_shift", "right_shift")},
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


def canonical(name: str) -> str:
    """The key in FUNCTIONS of a function that Python, numpy or torch call `name`."""
    plain = name[2:-2] if name.startswith("__") else name
    return ALIASES.get(plain, plain)


def function(name: str) -> Function | None:
    """The meaning of Python's, numpy's or torch's function `name`; None if expressions cannot say it."""
    return FUNCTIONS.get(canonical(name))
