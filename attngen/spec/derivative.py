"""Reverse-mode differentiation of expressions, with the derivative column of the operator table."""

from __future__ import annotations

from attngen.spec.expr import Apply, Const, Expr, Type, constant, walk
from attngen.spec.operator import FLOAT_ONE, FLOAT_ZERO, TABLE, add, apply, div, mul, neg, where


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
        for arg, contribution in zip(node.args, _contributions(gradient, node), strict=True):
            if contribution is not None and arg.type is Type.FLOAT:
                known = gradients.get(arg)
                gradients[arg] = contribution if known is None else add(known, contribution)
    return {node: with_one_constant(gradient) for node, gradient in gradients.items()}


def _contributions(gradient: Expr, node: Apply) -> tuple[Expr | None, ...]:
    """The gradient of each operand. Where that of the result is 0, because a branch is not taken, so is that of its operands,
    even if the operator's derivative is infinite or NaN there: 0 * inf is not 0."""
    taken, condition = _taken(gradient)
    of_taken = TABLE[node.op].derivative(taken, node, *node.args) if taken is gradient else _contributions(taken, node)
    if condition is None:
        return tuple(of_taken)
    return tuple(None if one is None else where(condition, one, FLOAT_ZERO) for one in of_taken)


def _taken(gradient: Expr) -> tuple[Expr, Expr | None]:
    """A gradient without the branch in which it is 0, and the condition of the other one; None: it has no such branch."""
    if not isinstance(gradient, Apply):
        return gradient, None
    if gradient.op == "where":
        condition, first, second = gradient.args
        if second == FLOAT_ZERO:
            return first, condition
        if first == FLOAT_ZERO:
            return second, apply("not", condition)
    if gradient.op == "add":
        conditions = [_all_conditions(term) for term in gradient.args]
        if conditions[0] is not None and conditions[1] is not None:
            return gradient, apply("or", conditions[0], conditions[1])
    return gradient, None


def _all_conditions(gradient: Expr) -> Expr | None:
    """The condition of a branch in a gradient, and of those nested in it; None: a branch that is 0 is not known."""
    taken, condition = _taken(gradient)
    nested = None if condition is None or taken is gradient else _all_conditions(taken)
    return condition if condition is None or nested is None else apply("and", condition, nested)


def with_one_constant(product: Expr) -> Expr:
    """`product` with its constant factors and divisors as one factor: 50 * x / 50, as the chain rule makes it, is x."""
    taken, condition = _taken(product)
    if condition is not None and taken is not product:
        return where(condition, with_one_constant(taken), FLOAT_ZERO)
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
