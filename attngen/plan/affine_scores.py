"""The part of a score that is affine in the key's index, as ALiBi's: a slope for each key, added to the rest of the score.

A thread then needs no distance of each pair: one number for its row in a tile, and a multiple of the slope for each key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.axes import MOVING
from attngen.spec.affine import affine_form
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, constant, names_in, walk
from attngen.spec.operator import add, apply, mul, neg

MOST_EXACT = 2**16  # for a coefficient of k: its multiples within a tile are numbers of fp32


@dataclass(frozen=True, slots=True)
class AffineScore:
    """A score as `rest + term`."""

    rest: Expr
    term: Expr  # depends on q and k; affine in k
    slope: Expr  # what `term` grows by from a key to the next: the same for all pairs of a head

    @property
    def falls(self) -> bool:
        """Whether `term` falls from a key to the next, if all captured numbers are positive, as ALiBi's slopes are."""
        return _sign(self.slope) < 0


def affine_score(score: Expr) -> AffineScore | None:
    """The score with its terms that are affine in k apart; None if it has none, or no others."""
    terms = list(_terms(score))
    slopes = {t: slope for t in terms if (slope := _slope(t)) is not None}
    rest = [t for t in terms if t not in slopes]
    if not slopes or not rest:
        return None
    return AffineScore(_sum(rest), _sum([t for t in terms if t in slopes]), _sum([slopes[t] for t in terms if t in slopes]))


def _terms(score: Expr) -> Iterator[Expr]:
    """What `score` is the sum of, in its order; what is subtracted with its sign."""
    stack = [(score, False)]
    while stack:
        node, negative = stack.pop()
        if isinstance(node, Apply) and node.type is Type.FLOAT and node.op in ("add", "sub"):
            first, second = node.args
            stack += [(second, negative != (node.op == "sub")), (first, negative)]
        elif isinstance(node, Apply) and node.type is Type.FLOAT and node.op == "neg":
            stack.append((node.args[0], not negative))
        else:
            yield neg(node) if negative else node


def _slope(term: Expr) -> Expr | None:
    """What `term` grows by from a key to the next, if that is the same for all pairs of a head; None otherwise."""
    match term:
        case Apply(op="neg", args=(inner,)):
            slope = _slope(inner)
            return None if slope is None else neg(slope)
        case Apply(op="mul", args=(a, b)):
            for factor, inner in ((a, b), (b, a)):
                if not names_in(factor) & MOVING and (slope := _slope(inner)) is not None:
                    return mul(factor, slope)
        case Apply(op="div", args=(inner, divisor)) if not names_in(divisor) & MOVING and (slope := _slope(inner)) is not None:
            return apply("div", slope, divisor)
        case Apply(op="float", args=(index,)):
            return _step(index)
    return None


def _step(index: Expr) -> Expr | None:
    """The coefficient of k in an integer, if it is a constant other than 0 and no element is read by q or k."""
    if any(isinstance(node, Gather) and names_in(node) & MOVING for node in walk(index)):
        return None
    of_k = {leaf: c for leaf, c in affine_form(index).coefficients.items() if "k" in names_in(leaf)}
    if len(of_k) != 1:
        return None
    ((leaf, coefficient),) = of_k.items()
    is_index = isinstance(leaf, Name)
    return constant(float(coefficient)) if is_index and abs(coefficient) <= MOST_EXACT else None


def _sign(number: Expr) -> int:
    """The sign of a number if what it captures is positive; 0 if it is a sum of terms of both signs."""
    signs = {_sign_of_term(term) for term in _terms(number)}
    return signs.pop() if len(signs) == 1 else 0


def _sign_of_term(term: Expr) -> int:
    match term:
        case Const(value=value):
            return (value > 0) - (value < 0)
        case Apply(op="neg", args=(inner,)):
            return -_sign(inner)
        case Apply(op="mul" | "div", args=(a, b)):
            return _sign(a) * _sign(b)
    return 1


def _sum(terms: list[Expr]) -> Expr:
    first, *others = terms
    for term in others:
        first = add(first, term)
    return first
