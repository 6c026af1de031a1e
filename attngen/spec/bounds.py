"""Interval arithmetic over expressions: the least and greatest value that an expression may have.

The rules are in the operator table. Intervals are themselves expressions, so that the same rule is evaluated here on constants
and printed as CUDA by the emitter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attngen.spec.expr import Apply, Const, Expr, ExpressionError, Gather, Name, Type, constant, walk
from attngen.spec.operator import EVERY_VALUE, TABLE, Interval

OfName = Callable[[Name], Interval]
OfGather = Callable[[Gather, tuple[Interval, ...]], Interval]
Range = tuple[int | float, int | float]


def interval(expr: Expr, of_name: OfName, of_gather: OfGather) -> Interval:
    """An interval that contains every value of `expr`, given those of its names and of the elements that it reads."""
    return intervals(expr, of_name, of_gather)[expr]


def intervals(
    expr: Expr, of_name: OfName, of_gather: OfGather, memo: dict[Expr, Interval] | None = None
) -> dict[Expr, Interval]:
    """`interval` of every node of `expr`. Known ones are read from `memo`; the others are added to it."""
    memo = {} if memo is None else memo
    for node in walk(expr, known=memo):
        match node:
            case Const():
                memo[node] = Interval(node, node)
            case Name():
                memo[node] = of_name(node)
            case Gather():
                memo[node] = of_gather(node, tuple(memo[a] for a in node.args))
            case Apply():
                memo[node] = TABLE[node.op].bounds(*(memo[a] for a in node.args))
    return memo


def ranges(expr: Expr, names: Mapping[str, Range], elements: Mapping[str, Range]) -> dict[Expr, Range]:
    """The range of every integer or float node of `expr`, given the ranges of names and of the elements of inputs.

    Other names and inputs may have any value of their type. Raises ExpressionError if an integer might not fit 64 bits.
    """
    found: dict[Expr, Interval] = {}
    range_of(expr, names, elements, found)
    return {node: _values(interval) for node, interval in found.items() if node.type is not Type.BOOL}


def range_of(expr: Expr, names: Mapping[str, Range], elements: Mapping[str, Range], memo: dict[Expr, Interval]) -> Range:
    """The range of `expr` as in `ranges`. `memo` has the nodes of earlier calls with the same ranges."""

    def known(range: Range | None, type: Type) -> Interval:
        return EVERY_VALUE[type] if range is None else Interval(constant(range[0]), constant(range[1]))

    try:
        intervals(expr, lambda n: known(names.get(n.name), n.type), lambda g, _: known(elements.get(g.input), g.type), memo)
    except ExpressionError as error:  # of a constant that does not fit 64 bits
        raise ExpressionError("an integer in this expression might not fit 64 bits", error.help) from error
    return _values(memo[expr])


def _values(interval: Interval) -> Range:
    lo, hi = interval
    assert isinstance(lo, Const), interval
    assert isinstance(hi, Const), interval
    return lo.value, hi.value
