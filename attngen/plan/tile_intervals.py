"""Interval arithmetic over a tile: what a mask's terms may be for the pairs of a tile, or for the indices of a block."""

from __future__ import annotations

from attngen.plan.axes import AXES, MOVING, TILE, TILE_RANGES, Axis
from attngen.plan.normal_form import connected, is_connection
from attngen.plan.spans import Span
from attngen.plan.tables import Tile, of_table, reads_blocks
from attngen.spec.attention import AttentionSpec
from attngen.spec.bounds import OfGather, Range, intervals, range_of
from attngen.spec.expr import Apply, Const, Expr, ExpressionError, Gather, Type, constant, gather, inputs_in, names_in, walk
from attngen.spec.obligations import DIVISIONS
from attngen.spec.operator import EVERY_VALUE, TABLE, Interval
from attngen.spec.ranges import element_ranges, name_ranges

LARGEST = 4096  # nodes of a bound: a larger one would take compilers longer than all the rest, and is dropped
MOST_DIVISIONS = 64  # per bound, for the same reason
MOST_VECTORS = 16  # a kernel computes the ranges of each over tiles beforehand; what further vectors hold is unknown


class TileIntervals:
    """The intervals of one mask's terms. Each is computed once; the spans that they read are collected.

    `block` is the axis of blocks; `tile` the lengths of a tile, rows and keys, if the intervals are for these alone.
    """

    def __init__(self, spec: AttentionSpec, block: Axis, tile: Tile | None) -> None:
        self._block: dict[str, Interval] = {block.index: block.interval}
        self._tile = tile
        self._names = name_ranges(spec) | TILE_RANGES
        self._elements = element_ranges(spec)
        self._spans: dict[Span, None] = {}
        self._ranges: dict[Expr, Interval] = {}
        self._over_tile: dict[Expr, Interval] = {}
        self._over_block: dict[Expr, Interval] = {}

    def of_mask(self, mask: Expr) -> Interval:
        """Whether every pair of a tile is allowed, and whether some pair is; an unknown term leaves what others say."""
        found: dict[Expr, Interval] = {}
        for term in connected(mask):
            try:
                if is_connection(term):
                    found[term] = TABLE[term.op].bounds(*(found[a] for a in term.args))
                else:
                    found[term] = self._of(term, TILE, self._element, self._over_tile)
                    for end in found[term]:
                        self.range(end)
            except ExpressionError:  # an integer might not fit 64 bits
                found[term] = EVERY_VALUE[Type.BOOL]
            if is_large(found[term]):
                found[term] = EVERY_VALUE[Type.BOOL]
        return found[mask]

    def of_block(self, expr: Expr) -> Interval:
        """The interval of `expr`, which does not depend on the other axis, over the indices of a block."""
        try:
            return self._of(expr, self._block, self._vector_element, self._over_block)
        except ExpressionError:  # a bound does not fit 64 bits
            return EVERY_VALUE[expr.type]

    def range(self, expr: Expr) -> Range:
        """The range of a bound in numbers. Raises ExpressionError if an integer might not fit 64 bits."""
        return range_of(expr, self._names, self._elements, self._ranges)

    def fits(self, expr: Expr) -> bool:
        """Whether every integer of `expr` is known to fit 64 bits."""
        try:
            self.range(expr)
        except ExpressionError:
            return False
        return True

    def spans(self, *bounds: Expr) -> tuple[Span, ...]:
        """The spans that `bounds` read."""
        inputs = inputs_in(*bounds)
        return tuple(s for s in self._spans if not inputs.isdisjoint(s.ends))

    def _of(self, expr: Expr, tile: dict[str, Interval], element: OfGather, memo: dict[Expr, Interval]) -> Interval:
        return intervals(expr, lambda n: tile.get(n.name, Interval(n, n)), element, memo)[expr]

    def _element(self, node: Gather, indices: tuple[Interval, ...]) -> Interval:
        if reads_blocks(node):
            return of_table(node, indices, self._every_value(node), self._tile)
        return self._vector_element(node, indices)

    def _vector_element(self, node: Gather, indices: tuple[Interval, ...]) -> Interval:
        moving = [dim for dim, index in enumerate(node.args) if names_in(index) & MOVING]
        if not moving:
            return Interval(node, node)
        dim = moving[0]
        axis = next((a for a in AXES.values() if node.args[dim] is a.at), None)
        if len(moving) > 1 or axis is None:
            return self._every_value(node)
        span = Span(node.input, dim, axis.index, len(node.args))
        vectors = {(s.input, s.dim) for s in self._spans}
        if len(vectors) >= MOST_VECTORS and (node.input, dim) not in vectors:
            return self._every_value(node)
        self._spans[span] = None
        if node.input in self._elements:
            self._elements |= dict.fromkeys(span.ends, self._elements[node.input])
        others = (*node.args[:dim], *node.args[dim + 1 :], axis.tile)
        return Interval(*(gather(end, node.type, others) for end in span.ends))

    def _every_value(self, node: Gather) -> Interval:
        known = self._elements.get(node.input)
        return EVERY_VALUE[node.type] if known is None else Interval(constant(known[0]), constant(known[1]))


def is_large(bounds: tuple[Expr, ...]) -> bool:
    """Whether compilers would take seconds for bounds like these."""
    size = max(bound.size for bound in bounds)
    return size > LARGEST or (size > MOST_DIVISIONS and _divisions(*bounds) > MOST_DIVISIONS)


def _divisions(*exprs: Expr) -> int:
    """The number of divisions by what is not a constant: each is some twenty instructions and a branch."""
    return sum(isinstance(n, Apply) and n.op in DIVISIONS and not isinstance(n.args[1], Const) for n in walk(*exprs))
