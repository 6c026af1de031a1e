"""Closed forms: comparisons that are affine in an index, solved for that index.

Solving for k gives the keys that a block of rows may see, and those that all its rows see; solving for q gives the rows of a
block of keys.
"""

from __future__ import annotations

from typing import NamedTuple

from attngen.plan.axes import Axis
from attngen.plan.normal_form import connected, is_connection, is_integer_comparison
from attngen.plan.tables import reads_tables
from attngen.plan.tile_intervals import TileIntervals, is_large
from attngen.spec.affine import AffineForm, difference
from attngen.spec.expr import Apply, Expr, constant, names_in, rewrite
from attngen.spec.operator import ZERO, floordiv, maximum, minimum, where


class IndexRange(NamedTuple):
    """The indices from `begin` up to but not including `end`."""

    begin: Expr
    end: Expr

    def meet(self, other: IndexRange) -> IndexRange:
        return IndexRange(maximum(self.begin, other.begin), minimum(self.end, other.end))

    def join(self, other: IndexRange) -> IndexRange:
        """The smallest range that contains both."""
        return IndexRange(minimum(self.begin, other.begin), maximum(self.end, other.end))


class Solved(NamedTuple):
    """The indices that a condition allows for a block of the other axis."""

    hull: IndexRange  # every index that it allows for some index of the block
    full: IndexRange | None  # it allows all of them for every index of the block; None: no such range is known

    def both(self, other: Solved) -> Solved:
        full = None if self.full is None or other.full is None else self.full.meet(other.full)
        return Solved(self.hull.meet(other.hull), full)

    def either(self, other: Solved) -> Solved:
        return Solved(self.hull.join(other.hull), None)

    def is_exact(self, block: Axis) -> bool:
        """Whether the condition allows a single index of `block` the indices of the hull and no others."""
        if self.full is None or block.tile.name in names_in(*self.hull, *self.full):
            return False

        def single(node: Expr) -> Expr | None:
            return block.at if node in (block.lo, block.hi) else None

        ends = zip(self.hull, self.full, strict=True)
        return all(hull is full or rewrite(hull, single) is rewrite(full, single) for hull, full in ends)


class ClosedForms:
    """The solutions of one mask's terms for `axis`. Each term is solved once."""

    def __init__(self, axis: Axis, intervals: TileIntervals) -> None:
        self._axis = axis
        self._intervals = intervals
        self._unknown = Solved(IndexRange(ZERO, axis.length), None)
        self._solved: dict[Expr, Solved] = {}

    def solve(self, mask: Expr) -> Solved:
        for term in connected(mask):
            if term not in self._solved:
                solved = self._connection(term) if is_connection(term) else self._term(term)
                large = is_large(solved.hull) or (solved.full is not None and is_large(solved.full))
                self._solved[term] = self._unknown if large else solved
        return self._solved[mask]

    def _connection(self, node: Apply) -> Solved:
        left, right = (self._solved[a] for a in node.args)
        return left.both(right) if node.op == "and" else left.either(right)

    def _term(self, term: Expr) -> Solved:
        if reads_tables(term):
            return self._unknown
        if self._axis.index not in names_in(term):
            condition, length = self._intervals.of_block(term), self._axis.length
            hull, full = (IndexRange(ZERO, where(holds, length, ZERO)) for holds in (condition.hi, condition.lo))
            solved: Solved | None = Solved(hull, full)
        else:
            solved = self._comparison(term) if is_integer_comparison(term) else None
        return solved if solved is not None and self._fits(solved) else self._unknown

    def _comparison(self, term: Apply) -> Solved | None:
        """The solution of a comparison of integers; None if it is not affine in the index."""
        slope, form = difference(*term.args).without(self._axis.at)
        if slope == 0 or self._axis.index in names_in(*form.coefficients):
            return None
        match term.op:
            case "ge":
                return self._at_least(slope, form)
            case "gt":
                return self._at_least(slope, form.shifted(-1))
            case "le":
                return self._at_least(-slope, form.scaled(-1))
            case "lt":
                return self._at_least(-slope, form.scaled(-1).shifted(-1))
            case "eq":
                return self._at_least(slope, form).both(self._at_least(-slope, form.scaled(-1)))
        return None

    def _at_least(self, slope: int, rest: AffineForm) -> Solved:
        """The indices i with `slope * i + rest >= 0`."""
        length, divisor = self._axis.length, constant(abs(slope))
        if slope > 0:  # i >= ceil(-rest / slope)
            bound = self._intervals.of_block(rest.scaled(-1).shifted(slope - 1).to_expr())
            first, last = floordiv(bound.lo, divisor), floordiv(bound.hi, divisor)
            return Solved(IndexRange(first, length), IndexRange(last, length))
        bound = self._intervals.of_block(rest.shifted(-slope).to_expr())  # i < floor(rest / -slope) + 1
        first, last = floordiv(bound.lo, divisor), floordiv(bound.hi, divisor)
        return Solved(IndexRange(ZERO, last), IndexRange(ZERO, first))

    def _fits(self, solved: Solved) -> bool:
        """Whether every integer of the closed forms is known to fit 64 bits."""
        return all(self._intervals.fits(end) for indices in solved for end in indices or ())
