"""Hypothesis strategies for expressions."""

from __future__ import annotations

from hypothesis import strategies as st

from attngen.spec.expr import Apply, Expr, ExpressionError, Type, constant, gather, name, walk
from attngen.spec.obligations import DIVISIONS
from attngen.spec.operator import apply, arity

INDEX = {n: name(n, Type.INT) for n in ("b", "h", "q", "k")}
WINDOW = name("window", Type.INT)
DOC = {i: gather("doc", Type.INT, (INDEX[i],)) for i in ("q", "k")}


def attempt(op: str, *args: Expr) -> Expr:
    """The expression, or its first operand if it is invalid (a constant division by zero)."""
    try:
        return apply(op, *args)
    except ExpressionError:
        return args[0]


def divides_by_window(expr: Expr) -> bool:
    """Whether `window` must not be 0."""
    return any(isinstance(n, Apply) and n.op in DIVISIONS and n.args[1] is WINDOW for n in walk(expr))


@st.composite
def integers(draw, depth: int = 3) -> Expr:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(
            st.sampled_from([INDEX["q"], INDEX["k"], INDEX["q"], INDEX["k"], WINDOW, DOC["q"], DOC["k"]])
            | st.integers(-20, 20).map(constant)
        )
    arithmetic = ["add", "sub", "sub", "mul", "min", "max", "abs", "neg", "floordiv", "mod", "where"]
    op = draw(st.sampled_from([*arithmetic, "bit_and", "bit_or", "bit_xor"]))
    if op in ("floordiv", "mod"):
        divisor = draw(st.sampled_from([*map(constant, (1, 2, 3, 7, -3)), WINDOW]))  # see `divides_by_window`
        return attempt(op, draw(integers(depth - 1)), divisor)
    if op == "where":
        return attempt(op, draw(booleans(depth - 1)), draw(integers(depth - 1)), draw(integers(depth - 1)))
    count = 1 if op in ("abs", "neg") else 2
    return attempt(op, *(draw(integers(depth - 1)) for _ in range(count)))


@st.composite
def booleans(draw, depth: int = 3) -> Expr:
    if depth == 0 or draw(st.integers(0, 1)) == 0:
        op = draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
        inner = max(0, depth - 1)
        return attempt(op, draw(integers(inner)), draw(integers(inner)))
    op = draw(st.sampled_from(["and", "and", "or", "not"]))
    return attempt(op, *(draw(booleans(depth - 1)) for _ in range(1 if op == "not" else 2)))


SMOOTH = (
    *("add", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin"),
    *("cos", "atan2", "erf", "pow", "min", "max", "abs", "where"),
)


@st.composite
def floats(draw, depth: int = 3) -> Expr:
    """Float expressions over x and y."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        leaf = st.sampled_from([name("x", Type.FLOAT), name("y", Type.FLOAT)])
        return draw(leaf | st.floats(-3, 3).filter(lambda v: v == 0 or abs(v) > 1e-3).map(lambda v: constant(float(v))))
    op = draw(st.sampled_from(SMOOTH))
    if op == "where":
        condition = attempt("lt", draw(floats(depth - 1)), draw(floats(depth - 1)))
        return attempt(op, condition, draw(floats(depth - 1)), draw(floats(depth - 1)))
    operands = [draw(floats(depth - 1)) for _ in range(arity(op))]
    if op in ("log", "log2", "log1p", "sqrt", "rsqrt", "pow"):  # away from 0, where their derivative is infinite
        operands[0] = attempt("add", attempt("abs", operands[0]), constant(0.5))
    if op in ("div", "atan2"):
        operands[1] = attempt("add", attempt("abs", operands[1]), constant(0.5))
    return attempt(op, *operands)
