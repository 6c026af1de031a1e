"""Reverse-mode differentiation of expressions, with the derivative column of the operator table."""

from __future__ import annotations

from attngen.spec.expr import Apply, Const, Expr, Type, constant, walk
from attngen.spec.operator import FLOAT_ONE, TABLE, add, div, mul, neg


def derivatives(expr: Expr) -> dict[Expr, Expr]:
    """The gradient of `expr` with respect to every float node of `expr` that it depends on smoothly.

    A name or an element of a captured tensor that is missing from the result has gradient zero. Nodes are accumulated in
    reverse topological order (Griewank and Walther, "Evaluating Derivatives", chapter 3).
    """
    assert expr.type is Type.FLOAT, expr.type
    gradients: dict[Expr, Expr] = {expr: FLOAT_ONE}
    for node in reversed(list(walk(expr))):
        gradient = gradients.get(node)
        if gradient is None or not isinstance(node, Apply):
            continue
        contributions = TABLE[node.op].derivative(gradient, node, *node.args)
        for arg, contribution in zip(node.args, contributions, strict=True):
            if contribution is not None and arg.type is Type.FLOAT:
                known = gradients.get(arg)
                gradients[arg] = contribution if known is None else add(known, contribution)
    return {node: with_one_constant(gradient) for node, gradient in gradients.items()}


def with_one_constant(product: Expr) -> Expr:
    """`product` with its constant factors and divisors as one factor: 50 * x / 50, as the chain rule makes it, is x."""
    factor, rest = 1.0, product
    kept: list[tuple[str, Expr]] = []  # operators that are applied to `rest`, the last first
    while isinstance(rest, Apply) and rest.op in ("mul", "div", "neg"):
        first, second = rest.args[0], rest.args[-1]
        if rest.op == "neg":
            factor, rest = -factor, first
        elif isinstance(second, Const) and second.value:
            factor, rest = (factor * second.value if rest.op == "mul" else factor / second.value), first
        elif rest.op == "mul" and isinstance(first, Const):
            factor, rest = factor * first.value, second
        else:
            kept.append((rest.op, second))
            rest = first
    if not 1e-30 < abs(factor) < 1e30:  # of fp32's numbers, and not 0
        return product
    for op, operand in reversed(kept):
        rest = mul(rest, operand) if op == "mul" else div(rest, operand)
    return rest if factor == 1.0 else neg(rest) if factor == -1.0 else mul(rest, constant(factor))
