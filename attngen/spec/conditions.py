"""What is known of the conditions of a spec for all pairs of all calls: those that have one value, and the keys that a row may
have."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attngen.spec.affine import AffineForm, difference
from attngen.spec.attention import SIZES, AttentionSpec
from attngen.spec.bounds import Range, range_of
from attngen.spec.expr import Apply, Expr, Name, Type, name, walk
from attngen.spec.obligations import EXTENTS
from attngen.spec.operator import FALSE, TRUE, Interval
from attngen.spec.ranges import element_ranges, name_ranges

NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
LIMITS = {"lt": (-math.inf, -1), "le": (-math.inf, 0), "gt": (1, math.inf), "ge": (0, math.inf), "eq": (0, 0), "ne": (0, 0)}


class Conditions:
    """What is known of the conditions of a spec, of all pairs of all calls, by the ranges of indices, sizes and elements."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._names = name_ranges(spec)
        self._names |= {n: (1, self._names[n][1]) for n in (*SIZES, *spec.free_dims) if self._names[n][0] == 0}
        self._elements = element_ranges(spec)
        self._found: dict[Expr, Interval] = {}

    def value(self, condition: Expr) -> bool | None:
        """The value that `condition` always has; None if that is unknown. Raises ExpressionError."""
        for node in walk(condition, known=self._found):
            decided = self._decided(node)
            if decided is None:
                range_of(node, self._names, self._elements, self._found)
            else:
                self._found[node] = Interval(*(TRUE if decided else FALSE,) * 2)
        lo, hi = self._found[condition]
        return lo is TRUE if lo is hi else None

    def _decided(self, node: Expr) -> bool | None:
        """The value of a node that comparisons of integers decide."""
        if not isinstance(node, Apply) or node.type is not Type.BOOL:
            return None
        if not self._may_be(node, True):
            return False
        return None if self._may_be(node, False) else True

    def range_of(self, expr: Expr) -> Range:
        """The range of an integer for all pairs of all calls. Raises ExpressionError."""
        return range_of(expr, self._names, self._elements, self._found)

    def range_under(self, leaf: Expr, condition: Expr) -> Range:
        """The range of the integer `leaf` in pairs of which `condition` is true; from inf to -inf if there are none."""
        limits = self._limits(condition, True)
        return (math.inf, -math.inf) if limits is None else limits.get(((leaf, 1),)) or self._range({leaf: 1})

    def _may_be(self, condition: Expr, value: bool) -> bool:
        """Whether the comparisons that `condition` implies if it has `value` may hold of one pair."""
        return self._limits(condition, value) is not None

    def _limits(self, condition: Expr, value: bool) -> dict[AffineKey, Range] | None:
        """The ranges that the comparisons which `condition` implies if it has `value` leave to sums of multiples; None if no
        pair is left."""
        limits: dict[AffineKey, Range] = {}
        for op, form in _implied(condition, value):
            key, sign = _key(form)
            low, high = limits.get(key) or self._range(dict(key))
            least, most = sorted(sign * (end - form.offset) for end in LIMITS[op])
            if op == "ne":
                if low == high == least:
                    return None
                continue
            limits[key] = low, high = max(low, least), min(high, most)
            if low > high:
                return None
        return limits

    def _range(self, coefficients: dict[Expr, int]) -> Range:
        """The range of a sum of multiples. An index is less than its size, which may be in the sum too."""
        ends = []
        for sign in (-1, 1):
            form = AffineForm({leaf: c for leaf, c in coefficients.items() if _extent(leaf) is None})
            for leaf, c in coefficients.items():
                extent = _extent(leaf)
                if extent is not None and c * sign > 0:
                    form = form.plus(AffineForm({extent: c}, -c))
            end: int | float = form.offset
            for leaf, c in form.coefficients.items():
                low, high = range_of(leaf, self._names, self._elements, self._found)
                end += c * (high if c * sign > 0 else low)
            ends.append(end)
        return ends[0], ends[1]


AffineKey = tuple[tuple[Expr, int], ...]


def _key(form: AffineForm) -> tuple[AffineKey, int]:
    """The multiples in `form`, or in -`form`, whichever begins with a positive factor; and the sign."""
    items = sorted(form.coefficients.items(), key=lambda item: repr(item[0]))
    sign = -1 if items and items[0][1] < 0 else 1
    return tuple((leaf, sign * c) for leaf, c in items), sign


def _extent(leaf: Expr) -> Expr | None:
    """The size that an index is less than; None for other leaves."""
    return name(EXTENTS[leaf.name], Type.INT) if isinstance(leaf, Name) and leaf.name in EXTENTS else None


def _implied(condition: Expr, value: bool) -> Iterator[tuple[str, AffineForm]]:
    """Comparisons of integers with 0 that hold if `condition` has `value`."""
    open_: list[tuple[Expr, bool]] = [(condition, value)]
    while open_:
        node, is_true = open_.pop()
        if not isinstance(node, Apply):
            continue
        if node.op == "not":
            open_.append((node.args[0], not is_true))
        elif node.op == ("and" if is_true else "or"):
            open_ += [(part, is_true) for part in node.args]
        elif node.op in NEGATED and node.args[0].type is Type.INT:
            yield node.op if is_true else NEGATED[node.op], difference(*node.args)
