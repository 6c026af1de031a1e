"""Tiles whose pairs all read the same elements: a bias by distance that stops changing at some distance, say.

Where an index of an element is bounded (`clamp(k - q, -127, 127)`), it is one number for every pair of a tile that is far
enough from the diagonal. The score of such a tile is a function of `s` alone, and what it reads is read once for all its pairs.
"""

from __future__ import annotations

from attngen.plan.axes import MOVING, TILE
from attngen.spec.attention import AttentionSpec
from attngen.spec.bounds import interval
from attngen.spec.expr import Apply, Expr, ExpressionError, Gather, Name, Type, constant, names_in, rewrite, walk
from attngen.spec.operator import FALSE, TRUE, Interval, both, equal, is_comparison

ANY_VALUE = {Type.BOOL: False, Type.INT: 0, Type.FLOAT: 0.0}


def uniform_score(spec: AttentionSpec) -> Expr | None:
    """Whether the score of every pair of a tile is that of its first pair, given `s`: a truth value over `q.lo q.hi k.lo k.hi`
    and what the score reads. It may be false although they are the same. None where it would never be true of a tile of several
    rows and keys, or the score reads no element that changes from pair to pair.
    """
    reads = [node for node in walk(spec.score) if isinstance(node, Gather) and names_in(node) & MOVING]
    if not reads or names_in(_without(spec.score, reads)) & MOVING:
        return None
    indices = [index for node in reads for index in node.args if names_in(index) & MOVING]
    if not all(map(_stops, indices)):
        return None
    condition: Expr = TRUE
    try:
        for index in dict.fromkeys(indices):
            low, high = interval(index, lambda n: TILE.get(n.name, Interval(n, n)), lambda node, _: _of_first_pair(node))
            condition = condition if low == high else both(condition, equal(low, high))
    except ExpressionError:  # a bound does not fit 64 bits
        return None
    return None if condition is FALSE else condition


def _of_first_pair(read: Expr) -> Interval:
    """The element that the first pair reads: that of all pairs, since its indices are asked about too."""
    first = rewrite(read, lambda node: TILE[node.name].lo if isinstance(node, Name) and node.name in TILE else None)
    return Interval(first, first)


def _without(score: Expr, reads: list[Gather]) -> Expr:
    """`score` with a constant of the same type in the place of what it reads."""
    return rewrite(score, lambda node: constant(ANY_VALUE[node.type]) if node in reads else None)


def _stops(index: Expr) -> bool:
    """Whether all that `index` takes of q and k has an end: a minimum, a maximum or a comparison that holds it."""
    if not names_in(index) & MOVING:
        return True
    if isinstance(index, Apply):
        return index.op in ("min", "max") or is_comparison(index.op) or all(map(_stops, index.args))
    return False
