"""ATen operators that compute each element from elements: arithmetic, comparisons, truth values, bits (see `aten.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from attngen.language.tracer import TraceError
from attngen.spec.expr import Const, Expr, Type, constant
from attngen.spec.operator import ONE, ZERO, add, apply, both, less, maximum, minimum, mul, sub, where
from attngen.torch.aten import MEANING, Call, Context, Lazy, cast, common, literal, meaning

# --- arithmetic -------------------------------------------------------------------------------------------------------


def _sum(call: Call, op: str) -> Lazy:
    alpha, kind = call.kwargs.get("alpha", 1), call.kind

    def of(a: Expr, b: Expr) -> Expr:
        if kind is Type.BOOL:
            return apply("or", a, b)
        a, b = common(a, b, kind)
        return apply(op, a, b if alpha == 1 else mul(cast(literal(alpha), kind), b))

    return call.elementwise(of, *call.args[:2], number=call.context.term if kind is Type.INT and alpha == 1 else literal)


MEANING["add"] = lambda call: _sum(call, "add")
MEANING["sub"] = lambda call: _sum(call, "sub")


@meaning("rsub")
def _(call: Call) -> Lazy:
    return _sum(Call(call.name, call.shape, call.dtype, (call.args[1], call.args[0]), call.kwargs, call.context), "sub")


@meaning("mul")
def _(call: Call) -> Lazy:
    if call.kind is Type.BOOL:
        return call.elementwise(both, *call.args)
    return call.elementwise(lambda a, b: mul(*common(a, b, call.kind)), *call.args)


def _truncated(a: Expr) -> Expr:
    return where(less(a, constant(0.0)), apply("ceil", a), apply("floor", a))


def _floor_divide(call: Call) -> Lazy:
    if call.kind is Type.FLOAT:
        return call.elementwise(lambda a, b: apply("floor", apply("div", *common(a, b, Type.FLOAT))), *call.args[:2])
    return call.elementwise(lambda a, b: call.context.divided("floordiv", *common(a, b, Type.INT)), *call.args[:2])


def _quotient_toward_zero(context: Context, a: Expr, b: Expr) -> Expr:
    size = context.divided("floordiv", apply("abs", a), apply("abs", b))
    return (
        size
        if context.range(a)[0] >= 0 and context.range(b)[0] >= 0
        else where(apply("ne", less(a, ZERO), less(b, ZERO)), apply("neg", size), size)
    )


MEANING["floor_divide"] = _floor_divide


@meaning("div")
def _(call: Call) -> Lazy:
    mode = call.kwargs.get("rounding_mode")
    if mode == "floor":
        return _floor_divide(call)
    if mode == "trunc":
        if call.kind is Type.INT:
            return call.elementwise(lambda a, b: _quotient_toward_zero(call.context, *common(a, b, Type.INT)), *call.args[:2])
        return call.elementwise(lambda a, b: _truncated(apply("div", *common(a, b, Type.FLOAT))), *call.args[:2])
    return call.elementwise(lambda a, b: apply("div", *common(a, b, Type.FLOAT)), *call.args[:2])


@meaning("remainder")
def _(call: Call) -> Lazy:
    def of_floats(a: Expr, b: Expr) -> Expr:
        a, b = common(a, b, Type.FLOAT)
        return sub(a, mul(b, apply("floor", apply("div", a, b))))

    if call.kind is Type.FLOAT:
        return call.elementwise(of_floats, *call.args)
    return call.elementwise(lambda a, b: call.context.divided("mod", *common(a, b, Type.INT)), *call.args)


@meaning("fmod")
def _(call: Call) -> Lazy:
    def of(a: Expr, b: Expr) -> Expr:
        a, b = common(a, b, call.kind)
        quotient = _truncated(apply("div", a, b)) if call.kind is Type.FLOAT else _quotient_toward_zero(call.context, a, b)
        return sub(a, mul(b, quotient))

    return call.elementwise(of, *call.args)


def _power(a: Expr, b: Expr, kind: Type) -> Expr:
    if isinstance(b, Const) and float(b.value).is_integer() and 0 <= b.value <= 8:
        return reduce(mul, [cast(a, kind)] * int(b.value), cast(ONE, kind))
    if kind is Type.INT:
        raise TraceError("a power of integers needs a constant exponent from 0 to 8: write float exponents, or a product")
    a, b = common(a, b, Type.FLOAT)
    if isinstance(a, Const) and a.value == 2.0:
        return apply("exp2", b)
    if isinstance(b, Const) and b.value in (0.5, -0.5):
        return apply("sqrt" if b.value > 0 else "rsqrt", a)
    return apply("div", constant(1.0), a) if isinstance(b, Const) and b.value == -1.0 else apply("pow", a, b)


MEANING["pow"] = lambda call: call.elementwise(lambda a, b: _power(a, b, call.kind), *call.args)
MEANING["square"] = lambda call: call.elementwise(lambda a: mul(a, a), *call.args)


def _unary(function: Callable[[Expr], Expr]) -> Callable[[Call], Lazy]:
    return lambda call: call.elementwise(function, call.args[0])


def _of_float(op: str) -> Callable[[Call], Lazy]:
    return _unary(lambda a: apply(op, cast(a, Type.FLOAT)))


for _op in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf", "log1p"):
    MEANING[_op] = _of_float(_op)

HALF, F0, F1 = constant(0.5), constant(0.0), constant(1.0)


def _rounding(function: Callable[[Expr], Expr]) -> Callable[[Call], Lazy]:
    return _unary(lambda a: a if a.type is Type.INT else function(a))


def _round_half_to_even(a: Expr) -> Expr:
    up = apply("floor", add(a, HALF))
    tie = apply("eq", sub(up, a), HALF)
    odd = apply("ne", mul(constant(2.0), apply("floor", mul(up, HALF))), up)
    return where(both(tie, odd), sub(up, F1), up)


def _sign(a: Expr) -> Expr:
    zero, one = (ZERO, ONE) if a.type is Type.INT else (F0, F1)
    return where(less(zero, a), one, where(less(a, zero), apply("neg", one), zero))


def _gelu(call: Call) -> Lazy:
    def of(x: Expr) -> Expr:
        if call.kwargs.get("approximate", "none") == "tanh":
            inner = mul(constant(math.sqrt(2.0 / math.pi)), add(x, mul(constant(0.044715), mul(x, mul(x, x)))))
            return mul(mul(HALF, x), add(F1, apply("tanh", inner)))
        return mul(mul(HALF, x), add(F1, apply("erf", mul(x, constant(math.sqrt(0.5))))))

    return call.elementwise(of, call.args[0])


def _relu(x: Expr) -> Expr:
    zero = ZERO if x.type is Type.INT else F0
    return where(less(zero, x), x, zero)  # its derivative at 0 is 0, as torch's; that of max is a half


def _softplus(call: Call) -> Lazy:
    beta, threshold = float(call.arg(1, "beta", 1.0)), float(call.arg(2, "threshold", 20.0))

    def of(x: Expr) -> Expr:
        scaled = mul(x, constant(beta))
        soft = apply("div", apply("log1p", apply("exp", minimum(scaled, constant(threshold)))), constant(beta))
        return where(less(constant(threshold), scaled), x, soft)

    return call.elementwise(of, call.args[0])


def _leaky(call: Call) -> Lazy:
    slope = constant(float(call.arg(1, "negative_slope", 0.01)))
    return call.elementwise(lambda x: where(less(F0, x), x, mul(x, slope)), call.args[0])


def _elu(call: Call) -> Lazy:
    alpha, scale, inner = (float(call.arg(n, k, 1.0)) for n, k in ((1, "alpha"), (2, "scale"), (3, "input_scale")))

    def of(x: Expr) -> Expr:
        below = mul(constant(alpha), sub(apply("exp", mul(minimum(x, F0), constant(inner))), F1))
        return mul(constant(scale), where(less(F0, x), x, below))

    return call.elementwise(of, call.args[0])


MEANING |= {
    "neg": _unary(lambda a: apply("neg", a)),
    "abs": _unary(lambda a: a if a.type is Type.BOOL else apply("abs", a)),
    "floor": _rounding(lambda a: apply("floor", a)),
    "ceil": _rounding(lambda a: apply("ceil", a)),
    "trunc": _rounding(_truncated),
    "fix": _rounding(_truncated),
    "round": _rounding(_round_half_to_even),
    "sign": _unary(_sign),
    "sgn": _unary(_sign),
    "reciprocal": _unary(lambda a: apply("div", F1, cast(a, Type.FLOAT))),
    "expm1": _unary(lambda a: sub(apply("exp", cast(a, Type.FLOAT)), F1)),
    "log10": _unary(lambda a: mul(apply("log", cast(a, Type.FLOAT)), constant(1.0 / math.log(10.0)))),
    "erfc": _unary(lambda a: sub(F1, apply("erf", cast(a, Type.FLOAT)))),
    "tan": _unary(lambda a: apply("div", apply("sin", cast(a, Type.FLOAT)), apply("cos", cast(a, Type.FLOAT)))),
    "silu": _unary(lambda a: mul(a, apply("sigmoid", a))),
    "log_sigmoid_forward": _unary(lambda a: sub(minimum(a, F0), apply("log1p", apply("exp", apply("neg", apply("abs", a)))))),
    "relu": _unary(_relu),
    "gelu": _gelu,
    "softplus": _softplus,
    "leaky_relu": _leaky,
    "elu": _elu,
    "hardtanh": lambda call: _clamped(call, call.arg(1, "min_val", -1.0), call.arg(2, "max_val", 1.0)),
    "relu6": lambda call: _clamped(call, 0, 6),
    "isnan": _unary(lambda a: apply("ne", a, a)),
    "isinf": _unary(lambda a: apply("eq", apply("abs", a), constant(math.inf))),
    "isfinite": _unary(lambda a: less(apply("abs", a), constant(math.inf))),
    "fill": lambda call: call.elementwise(lambda v: cast(v, call.kind), call.args[1]),
}


# --- comparisons, truth values, bits ----------------------------------------------------------------------------------


def _compared(op: str) -> Callable[[Call], Lazy]:
    def of(a: Expr, b: Expr) -> Expr:
        kinds = {a.type, b.type}
        if kinds == {Type.BOOL} and op in ("eq", "ne"):
            return apply(op, a, b)
        return apply(op, *common(a, b, Type.FLOAT if Type.FLOAT in kinds else Type.INT))

    return lambda call: call.elementwise(of, *call.args, number=call.context.term)


for _op in ("lt", "le", "gt", "ge", "eq", "ne"):
    MEANING[_op] = _compared(_op)


def _bits(op: str, of_truth: str) -> Callable[[Call], Lazy]:
    def meant(call: Call) -> Lazy:
        if call.kind is Type.BOOL:
            return call.elementwise(lambda a, b: apply(of_truth, a, b), *call.args)
        return call.elementwise(lambda a, b: apply(op, *common(a, b, Type.INT)), *call.args)

    return meant


def _logical(op: str) -> Callable[[Call], Lazy]:
    return lambda call: call.elementwise(lambda *args: apply(op, *(cast(a, Type.BOOL) for a in args)), *call.args)


def _inverted(call: Call) -> Lazy:
    if call.kind is Type.BOOL:
        return call.elementwise(lambda a: apply("not", a), *call.args)
    top = constant(255 if call.dtype is torch.uint8 else -1)
    return call.elementwise(lambda a: sub(top, a), *call.args)


def _shifted(call: Call, op: str) -> Lazy:
    def of(value: Expr, places: Expr) -> Expr:
        value, places = common(value, places, Type.INT)
        if isinstance(places, Const) and 0 <= places.value <= 62:
            return apply(op, value, constant(2 ** int(places.value)))
        for bit in range(5):
            is_set = apply("eq", apply("mod", apply("floordiv", places, constant(2**bit)), constant(2)), ONE)
            value = where(is_set, apply(op, value, constant(2 ** (2**bit))), value)
        return value

    return call.elementwise(of, *call.args)


for _one, _op, _of_truth in (("and", "bit_and", "and"), ("or", "bit_or", "or"), ("xor", "bit_xor", "ne")):
    MEANING |= dict.fromkeys((f"bitwise_{_one}", f"__{_one}__"), _bits(_op, _of_truth))
    MEANING[f"logical_{_one}"] = _logical(_of_truth)
MEANING |= {
    "bitwise_not": _inverted,
    "logical_not": _logical("not"),
    **dict.fromkeys(("__lshift__", "bitwise_left_shift"), lambda call: _shifted(call, "mul")),
    **dict.fromkeys(("__rshift__", "bitwise_right_shift"), lambda call: _shifted(call, "floordiv")),
}


@meaning("where")
def _(call: Call) -> Lazy:
    return call.elementwise(lambda c, a, b: where(cast(c, Type.BOOL), *common(a, b, call.kind)), *call.args)


@meaning("masked_fill")
def _(call: Call) -> Lazy:
    return call.elementwise(lambda x, c, v: where(c, *common(v, x, call.kind)), *call.args)


def _clamped(call: Call, low: Any, high: Any) -> Lazy:
    kind = call.kind
    number = call.context.term if kind is Type.INT else literal
    bounds = [b for b in (low, high) if b is not None]

    def of(x: Expr, *ends: Expr) -> Expr:
        x, found = cast(x, kind), iter(ends)
        if low is not None:
            x = maximum(x, cast(next(found), kind))
        return x if high is None else minimum(x, cast(next(found), kind))

    return call.elementwise(of, call.args[0], *bounds, number=number)


MEANING |= {
    **dict.fromkeys(("clamp", "clip"), lambda call: _clamped(call, call.arg(1, "min"), call.arg(2, "max"))),
    "clamp_min": lambda call: _clamped(call, call.arg(1, "min"), None),
    "clamp_max": lambda call: _clamped(call, None, call.arg(1, "max")),
    **dict.fromkeys(
        ("minimum", "fmin"), lambda call: call.elementwise(lambda a, b: minimum(*common(a, b, call.kind)), *call.args)
    ),
    **dict.fromkeys(
        ("maximum", "fmax"), lambda call: call.elementwise(lambda a, b: maximum(*common(a, b, call.kind)), *call.args)
    ),
}
