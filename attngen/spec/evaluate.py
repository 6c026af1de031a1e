"""The value of an expression on arrays, with the array column of the operator table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Scalar, walk
from attngen.spec.operator import PYTHON, TABLE

ReadInput = Callable[[str, tuple[Any, ...]], Any]
Computed = Callable[[Mapping[str, object]], tuple[Any, ...]]  # what `on_numbers` makes
Numbers = Mapping[str, int | float]


def evaluate(
    expr: Expr,
    names: Mapping[str, object],
    read: ReadInput,
    xp: object,
    literal: Callable[[Scalar], object] = lambda value: value,
) -> Any:
    """`expr` with every name replaced by its array (arrays broadcast), elements of inputs given by `read(input, indices)`.

    `xp` is the namespace of the arrays: numpy or a TorchNamespace. Integer arrays should be int64, float arrays of the
    precision wanted for the result. `literal` converts a constant to an array, as that of a TorchNamespace does.
    """
    memo: dict[Expr, object] = {}
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


def on_numbers(*exprs: Expr, xp: object = PYTHON) -> Computed:
    """`exprs` as a function of the values of their names: numbers, or arrays of the namespace `xp`. They are walked once, here,
    so that a call is cheap; they must not read captured tensors.

    The function raises ArithmeticError or ValueError if an operator has no value for the numbers.
    """
    nodes = list(walk(*exprs))
    place = {node: i for i, node in enumerate(nodes)}
    start = [node.value if isinstance(node, Const) else None for node in nodes]
    names = [(place[node], node.name) for node in nodes if isinstance(node, Name)]
    steps = [
        (place[node], TABLE[node.op].array, tuple(place[a] for a in node.args)) for node in nodes if isinstance(node, Apply)
    ]
    wanted = [place[expr] for expr in exprs]
    assert not any(isinstance(node, Gather) for node in nodes), exprs

    def values(numbers: Mapping[str, object]) -> tuple[object, ...]:
        found: list[object] = [*start]
        for at, name in names:
            found[at] = numbers[name]
        for at, operator, operands in steps:
            found[at] = operator(xp, *[found[o] for o in operands])
        return tuple([found[at] for at in wanted])

    return values
