"""The value of an expression on arrays, with the array column of the operator table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attngen.spec.expr import Apply, Const, Expr, Gather, Name, walk
from attngen.spec.operator import TABLE

ReadInput = Callable[[str, tuple[Any, ...]], Any]


def evaluate(
    expr: Expr, names: Mapping[str, Any], read: ReadInput, xp: Any, literal: Callable[[Any], Any] = lambda value: value
) -> Any:
    """`expr` with every name replaced by its array (arrays broadcast), elements of inputs given by `read(input, indices)`.

    `xp` is the namespace of the arrays: numpy or torch. Integer arrays should be int64, float arrays of the precision
    wanted for the result. `literal` makes an array of a constant where the namespace needs one (torch).
    """
    memo: dict[Expr, Any] = {}
    for node in walk(expr):
        match node:
            case Const():
                memo[node] = literal(node.value)
            case Name():
                memo[node] = names[node.name]
            case Gather():
                memo[node] = read(node.input, tuple(memo[a] for a in node.args))
            case Apply():
                memo[node] = TABLE[node.op].array(xp, *(memo[a] for a in node.args))
    return memo[expr]
