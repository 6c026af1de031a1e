"""Interval arithmetic over expressions: the least and greatest value that an expression may have.

The rules are in the operator table. Intervals are themselves expressions, so that the same rule is evaluated here on constants
and printed as CUDA by the emitter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_float

from attngen.spec.expr import Apply, Const, Expr, ExpressionError, Gather, Name, Type, constant, walk
from attngen.spec.operator import EVERY_VALUE, TABLE, Interval, add, maximum, minimum, sub

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

    Other names and inputs may have any value of their type. A branch of `where` is bounded under its condition: where(n < 8, n,
    0) is less than 8. Raises ExpressionError if an integer might not fit 64 bits.
    """
    found: dict[Expr, Interval] = {}
    range_of(expr, names, elements, found)
    return {node: _values(interval) for node, interval in found.items() if node.type is not Type.BOOL}


def range_of(expr: Expr, names: Mapping[str, Range], elements: Mapping[str, Range], memo: dict[Expr, Interval]) -> Range:
    """The range of `expr` as in `ranges`. `memo` has the nodes of earlier calls with the same ranges."""

    def known(range: Range | None, type: Type) -> Interval:
        return EVERY_VALUE[type] if range is None else Interval(constant(range[0]), constant(range[1]))

    try:
        for node in walk(expr, known=memo):
            match node:
                case Const():
                    memo[node] = _of_constant(node)
                case Name():
                    memo[node] = known(names.get(node.name), node.type)
                case Gather():
                    memo[node] = known(elements.get(node.input), node.type)
                case Apply():
                    memo[node] = _of_operator(node, memo)
    except ExpressionError as error:  # a constant does not fit 64 bits
        raise ExpressionError("an integer in this expression might not fit 64 bits", error.help) from error
    return _values(memo[expr])


def _of_constant(node: Const) -> Interval:
    """A float has the nearest number of fp32 in a kernel, and its own value in a reference of fp64."""
    if node.type is not Type.FLOAT:
        return Interval(node, node)
    rounded = constant(c_float(node.value).value)
    return Interval(minimum(node, rounded), maximum(node, rounded))


MAX_BRANCH = 400  # nodes of a branch that is bounded once more under its condition


def _of_operator(node: Apply, known: Mapping[Expr, Interval]) -> Interval:
    """The constant interval of `node`, given those of its operands."""
    operands = [known[a] for a in node.args]
    if node.op == "where" and node.size <= MAX_BRANCH:
        condition, *branches = node.args
        operands[1:] = [_under(condition, is_true, b, known) for is_true, b in zip((True, False), branches, strict=True)]
    return TABLE[node.op].bounds(*operands)


def _under(condition: Expr, is_true: bool, branch: Expr, known: Mapping[Expr, Interval]) -> Interval:
    """The constant interval of `branch` if `condition` is true, or if it is false."""
    found = _implied(condition, is_true, known)
    if not found:
        return known[branch]
    for node in walk(branch, known=found):
        if isinstance(node, Apply) and any(a in found for a in node.args):
            under = TABLE[node.op].bounds(*(found.get(a, known[a]) for a in node.args))
            found[node] = _both(under, known[node]) if node.type is Type.INT else under
    return found.get(branch, known[branch])


def _both(a: Interval, b: Interval) -> Interval:
    """What two constant intervals of integers share."""
    return Interval(maximum(a.lo, b.lo), minimum(a.hi, b.hi))


def _implied(condition: Expr, is_true: bool, known: Mapping[Expr, Interval]) -> dict[Expr, Interval]:
    """Operands of the comparisons in `condition` with the intervals that its truth leaves them."""
    found: dict[Expr, Interval] = {}
    rest = [(condition, is_true)]
    while rest:
        node, is_true = rest.pop()
        if not isinstance(node, Apply):
            continue
        if node.op == "not":
            rest.append((node.args[0], not is_true))
        elif node.op == ("and" if is_true else "or"):
            rest += [(part, is_true) for part in node.args]
        elif node.op in NEGATED and node.args[0].type is Type.INT:
            op = node.op if is_true else NEGATED[node.op]
            least, most = reversed(node.args) if op in ("gt", "ge") else node.args
            gap = constant(int(op in ("lt", "gt")))
            below, above = (found.get(e, known[e]) for e in (least, most))
            found[least] = Interval(below.lo, minimum(below.hi, sub(above.hi, gap)))
            found[most] = Interval(maximum(above.lo, add(below.lo, gap)), above.hi)
    is_possible = all(lo <= hi for lo, hi in map(_values, found.values()))
    return found if is_possible else {}


NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def _values(interval: Interval) -> Range:
    lo, hi = interval
    assert isinstance(lo, Const), interval
    assert isinstance(hi, Const), interval
    return lo.value, hi.value
