"""The normal form of a mask: negations only at comparisons, and each index at most once in a comparison of integers.

Affine comparisons in normal form have exact intervals, and can be solved for an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeGuard

from attngen.spec.affine import AffineForm, difference
from attngen.spec.expr import Apply, Expr, ExpressionError, Type, rewrite, walk
from attngen.spec.operator import apply, neg, negation

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
FLIPPED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def connected(mask: Expr) -> Iterator[Expr]:
    """The distinct terms that `mask` connects by `and` and `or`, and these connections, operands before what connects them."""
    return walk(mask, through=is_connection)


def is_connection(node: Expr) -> TypeGuard[Apply]:
    return isinstance(node, Apply) and node.op in ("and", "or")


def is_integer_comparison(node: Expr) -> TypeGuard[Apply]:
    return isinstance(node, Apply) and node.op in FLIPPED and node.args[0].type is Type.INT


def conjuncts(mask: Expr) -> list[Expr]:
    """The conditions that `mask` joins by `and`, in their order."""
    found, stack = [], [mask]
    while stack:
        node = stack.pop()
        if isinstance(node, Apply) and node.op == "and":
            stack.extend(reversed(node.args))
        else:
            found.append(node)
    return found


def normalized(mask: Expr, fits: Callable[[Expr], bool]) -> Expr:
    """The normal form of `mask`.

    Comparisons of floats keep their negation, since `not (x < y)` is true of NaN and `x >= y` is not. Comparisons of integers
    whose normal form might not fit 64 bits, as `fits` tells, stay as they are: a term moves from one side to the other.
    """

    def normal(node: Expr) -> Expr | None:
        if not is_integer_comparison(node):
            return None
        try:
            comparison = _normal_comparison(node)
        except ExpressionError:  # a constant does not fit
            return None
        return comparison if fits(comparison) else None

    return rewrite(_pushed(mask), normal)


def _pushed(mask: Expr) -> Expr:
    """`mask` with negations pushed down."""
    done: dict[tuple[Expr, bool], Expr] = {}  # by node, and whether it is negated
    stack = [(mask, False)]
    while stack:
        node, negate = stack[-1]
        operands = _operands(node, negate)
        missing = [operand for operand in operands if operand not in done]
        if missing:
            stack.extend(reversed(missing))
            continue
        done[node, negate] = _pushed_node(node, negate, [done[operand] for operand in operands])
        stack.pop()
    return done[mask, False]


def _operands(node: Expr, negate: bool) -> list[tuple[Expr, bool]]:
    """The operands of `node` that a negation is pushed into, and whether they are negated then."""
    if isinstance(node, Apply) and node.op in ("not", "and", "or"):
        return [(a, negate != (node.op == "not")) for a in node.args]
    return []


def _pushed_node(node: Expr, negate: bool, operands: list[Expr]) -> Expr:
    if isinstance(node, Apply):
        if node.op == "not":
            return operands[0]
        if node.op in ("and", "or"):
            return apply(node.op if not negate else {"and": "or", "or": "and"}[node.op], *operands)
        if is_integer_comparison(node):
            return _without_abs(FLIPPED[node.op] if negate else node.op, *node.args)
    return negation(node) if negate else node


def _without_abs(op: str, left: Expr, right: Expr) -> Expr:
    """A comparison of integers. One of a magnitude becomes two, which can be solved: `abs(x) <= y` is `x <= y and -x <= y`."""
    if isinstance(left, Apply) and left.op == "abs" and op in MIRRORED:
        both = (_without_abs(op, x, right) for x in (left.args[0], neg(left.args[0])))
        return apply("and" if op in ("lt", "le") else "or", *both)
    if isinstance(right, Apply) and right.op == "abs" and op in MIRRORED:
        return _without_abs(MIRRORED[op], right, left)
    return apply(op, left, right)


def _normal_comparison(node: Apply) -> Expr:
    """The comparison with every affine term once: positive ones on the left, the others on the right."""
    form = difference(*node.args)
    left = AffineForm({leaf: c for leaf, c in form.coefficients.items() if c > 0}, max(form.offset, 0))
    right = AffineForm({leaf: -c for leaf, c in form.coefficients.items() if c < 0}, max(-form.offset, 0))
    return apply(node.op, left.to_expr(), right.to_expr())
