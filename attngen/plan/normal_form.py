"""The normal form of a mask: negation at its comparisons, and those of integers with each index once.

Affine comparisons in normal form have exact intervals, and can be solved for an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from attngen.spec.expr import Apply, Const, Expr, ExpressionError, Type, constant, rewrite
from attngen.spec.operator import add, apply, mul, neg, negation, sub

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
FLIPPED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def connected(mask: Expr) -> Iterator[Expr]:
    """The distinct terms that `mask` connects by `and` and `or`, and these connections, operands before what connects them."""
    seen: set[Expr] = set()
    stack = [(mask, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if is_connection(node):
                stack.extend((a, False) for a in reversed(node.args))


def is_connection(node: Expr) -> TypeGuard[Apply]:
    return isinstance(node, Apply) and node.op in ("and", "or")


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


def normalized(mask: Expr) -> Expr:
    """`mask` with negation pushed down to comparisons of integers, and those comparisons in normal form.

    In normal form each index occurs once, which makes the interval of an affine comparison exact. Comparisons of floats
    keep their negation, since `not (x < y)` is true of NaN and `x >= y` is not.
    """

    return rewrite(_pushed(mask), _normal_comparison)


def _pushed(mask: Expr) -> Expr:
    """`mask` with negations pushed down."""
    done: dict[tuple[Expr, bool], Expr] = {}  # of each node, and whether it is negated
    stack = [(mask, False)]
    while stack:
        node, negate = stack[-1]
        if (node, negate) in done:
            stack.pop()
            continue
        inner = _operands(node, negate)
        missing = [pair for pair in inner if pair not in done]
        if missing:
            stack.extend(reversed(missing))
            continue
        done[node, negate] = _pushed_node(node, negate, [done[pair] for pair in inner])
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
        if node.op in FLIPPED and node.args[0].type is Type.INT:
            return _without_abs(FLIPPED[node.op] if negate else node.op, *node.args)
    return negation(node) if negate else node


def _without_abs(op: str, left: Expr, right: Expr) -> Expr:
    """A comparison of integers; of a magnitude as two, which can be solved for k: `abs(x) <= y` is `x <= y and -x <= y`."""
    if isinstance(left, Apply) and left.op == "abs" and op in MIRRORED:
        both = (_without_abs(op, x, right) for x in (left.args[0], neg(left.args[0])))
        return apply("and" if op in ("lt", "le") else "or", *both)
    if isinstance(right, Apply) and right.op == "abs" and op in MIRRORED:
        return _without_abs(MIRRORED[op], right, left)
    return apply(op, left, right)


def _normal_comparison(node: Expr) -> Expr | None:
    """A comparison of integers with every affine term once: those of positive sign on the left, the others on the right."""
    if not (isinstance(node, Apply) and node.op in FLIPPED and node.args[0].type is Type.INT):
        return None
    try:
        difference = sub_affine(affine_form(node.args[0]), affine_form(node.args[1]))
    except ExpressionError:
        return None
    left = AffineForm({leaf: c for leaf, c in difference.coefficients.items() if c > 0}, max(difference.offset, 0))
    right = AffineForm({leaf: -c for leaf, c in difference.coefficients.items() if c < 0}, max(-difference.offset, 0))
    return apply(node.op, left.to_expr(), right.to_expr())


@dataclass(slots=True)
class AffineForm:
    """`offset + sum of coefficient * leaf`."""

    coefficients: dict[Expr, int]
    offset: int = 0

    def negated(self) -> AffineForm:
        return AffineForm({leaf: -c for leaf, c in self.coefficients.items()}, -self.offset)

    def shifted(self, by: int) -> AffineForm:
        return AffineForm(dict(self.coefficients), self.offset + by)

    def to_expr(self) -> Expr:
        """Positive terms first, so that it reads well."""
        result: Expr | None = None
        for leaf, coefficient in sorted(self.coefficients.items(), key=lambda item: item[1] < 0):
            term = mul(constant(abs(coefficient)), leaf)
            if result is None:
                result = term if coefficient > 0 else neg(term)
            else:
                result = add(result, term) if coefficient > 0 else sub(result, term)
        if result is None:
            return constant(self.offset)
        return sub(result, constant(-self.offset)) if self.offset < 0 else add(result, constant(self.offset))


def affine_form(expr: Expr | AffineForm) -> AffineForm:
    """`expr` as an affine form; what is not affine is a leaf of it."""
    if isinstance(expr, AffineForm):
        return AffineForm(dict(expr.coefficients), expr.offset)
    memo: dict[Expr, AffineForm] = {}
    return _affine(expr, memo)


def _affine(expr: Expr, memo: dict[Expr, AffineForm]) -> AffineForm:
    if expr in memo:
        return memo[expr]
    result: AffineForm
    match expr:
        case Const(value=value):
            result = AffineForm({}, int(value))
        case Apply(op="add", args=(a, b)):
            result = sub_affine(_affine(a, memo), _affine(b, memo).negated())
        case Apply(op="sub", args=(a, b)):
            result = sub_affine(_affine(a, memo), _affine(b, memo))
        case Apply(op="neg", args=(a,)):
            result = _affine(a, memo).negated()
        case Apply(op="mul", args=(Const(value=c), a)) | Apply(op="mul", args=(a, Const(value=c))):
            inner = _affine(a, memo)
            result = AffineForm({leaf: int(c) * v for leaf, v in inner.coefficients.items()}, int(c) * inner.offset)
        case _:
            result = AffineForm({expr: 1})
    memo[expr] = result
    return result


def sub_affine(a: AffineForm, b: AffineForm) -> AffineForm:
    coefficients = dict(a.coefficients)
    for leaf, c in b.coefficients.items():
        coefficients[leaf] = coefficients.get(leaf, 0) - c
    return AffineForm({leaf: c for leaf, c in coefficients.items() if c}, a.offset - b.offset)
