"""Reverse-mode differentiation of expressions, with the derivative column of the operator table."""

from __future__ import annotations

from attngen.spec.expr import Apply, Expr, Type, walk
from attngen.spec.operator import FLOAT_ONE, TABLE, add


def derivatives(expr: Expr, seed: Expr = FLOAT_ONE) -> dict[Expr, Expr]:
    """The gradient of `seed * expr` with respect to every float node of `expr` that it depends on smoothly.

    A name or an element of a captured tensor that is missing from the result has gradient zero. Nodes are accumulated in
    reverse topological order (Griewank and Walther, "Evaluating Derivatives", chapter 3).
    """
    assert expr.type is Type.FLOAT, expr.type
    gradients: dict[Expr, Expr] = {expr: seed}
    for node in reversed(list(walk(expr))):
        gradient = gradients.get(node)
        if gradient is None or not isinstance(node, Apply):
            continue
        contributions = TABLE[node.op].derivative(gradient, node, *node.args)
        for arg, contribution in zip(node.args, contributions, strict=True):
            if contribution is not None and arg.type is Type.FLOAT:
                known = gradients.get(arg)
                gradients[arg] = contribution if known is None else add(known, contribution)
    return gradients
