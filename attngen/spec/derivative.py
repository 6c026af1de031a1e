"""Reverse-mode differentiation of expressions, with the derivative column of the operator table."""

from __future__ import annotations

from attngen.spec.expr import Apply, Const, Expr, Type, constant, walk
from attngen.spec.operator import FLOAT_ONE, FLOAT_ZERO, TABLE, add, apply, div, mul, neg, where


def derivatives(expr: Expr) -> dict[Expr, Expr]:
    """The gradient of `expr` with respect to every float node of `expr` that it depends on smoothly.

    A name or an element of a captured tensor that is missing from the result has gradient zero. Nodes are accumulated in
    reverse topological order (Griewank and Walther, "Evaluating Derivatives", chapter 3): the distinct nodes of all gradients
    are a small multiple of those of `expr`, however often they share them.
    """
    assert expr.type is Type.FLOAT, expr.type
    gradients: dict[Expr, Expr] = {expr: FLOAT_ONE}
    conditions: dict[Expr, Expr | None] = {}
    for node in reversed(list(walk(expr))):
        gradient = gradients.get(node)
        if gradient is None or not isinstance(node, Apply):
            continue
        for arg, contribution in zip(node.args, _contributions(gradient, node, conditions), strict=True):
            if contribution is not None and arg.type is Type.FLOAT:
                known = gradients.get(arg)
                gradients[arg] = contribution if known is None else add(known, contribution)
    return {node: with_one_constant(gradient) for node, gradient in gradients.items()}


def _contributions(gradient: Expr, node: Apply, known: dict[Expr, Expr | None]) -> tuple[Expr | None, ...]:
    """The gradient of each operand. Where that of the result is 0, because a branch is not taken, so is that of its operands,
    even if the operator's derivative is infinite or NaN there: 0 * inf is not 0. `known`: see `_may_differ_from_0`."""
    taken, conditions = _taken(gradient)
    if isinstance(taken, Apply) and taken.op == "add":
        of_sum = _may_differ_from_0(taken, known)
        conditions += [] if of_sum is None else [of_sum]
    contributions = TABLE[node.op].derivative(taken, node, *node.args)
    return tuple(None if one is None else _where_all(conditions, one) for one in contributions)


def _taken(gradient: Expr) -> tuple[Expr, list[Expr]]:
    """A gradient without the branches in which it is 0, and the conditions of those that are left, the outermost first."""
    conditions: list[Expr] = []
    while (branch := _branch(gradient)) is not None:
        condition, gradient = branch
        conditions.append(condition)
    return gradient, conditions


def _branch(gradient: Expr) -> tuple[Expr, Expr] | None:
    """The condition of a gradient that is 0 in one branch, and the other branch; None: it has no such branch."""
    if isinstance(gradient, Apply) and gradient.op == "where":
        condition, first, second = gradient.args
        if second == FLOAT_ZERO:
            return condition, first
        if first == FLOAT_ZERO:
            return apply("not", condition), second
    return None


def _where_all(conditions: list[Expr], gradient: Expr) -> Expr:
    """`gradient` where all of `conditions` hold, else 0."""
    for condition in reversed(conditions):
        gradient = where(condition, gradient, FLOAT_ZERO)
    return gradient


def _may_differ_from_0(gradient: Expr, known: dict[Expr, Expr | None]) -> Expr | None:
    """The condition of the branches of a gradient, or of the terms of a sum; None: it may differ from 0 anywhere. `known` has
    the conditions of earlier calls: sums share their terms."""
    for node in walk(gradient, known=known, through=_is_sum_or_branch):
        known[node] = None
        if isinstance(node, Apply) and node.op == "add":
            first, second = (known[term] for term in node.args)
            known[node] = None if first is None or second is None else apply("or", first, second)
        elif (branch := _branch(node)) is not None:
            condition, taken = branch
            nested = known[taken]
            known[node] = condition if nested is None else apply("and", condition, nested)
    return known[gradient]


def _is_sum_or_branch(node: Expr) -> bool:
    return isinstance(node, Apply) and node.op in ("add", "where")


def with_one_constant(product: Expr) -> Expr:
    """`product` with its constant factors and divisors as one factor: 50 * x / 50, as the chain rule makes it, is x."""
    taken, conditions = _taken(product)
    return _where_all(conditions, _with_one_constant(taken))


def _with_one_constant(product: Expr) -> Expr:
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
    if not 1e-30 < abs(factor) < 1e30:  # the factor must be a number of fp32 other than 0
        return product
    for op, operand in reversed(kept):
        rest = mul(rest, operand) if op == "mul" else div(rest, operand)
    return rest if factor == 1.0 else neg(rest) if factor == -1.0 else mul(rest, constant(factor))
