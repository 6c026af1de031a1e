"""What is unlikely to be meant in a valid spec: warnings. `attngen.spec.check` finds what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attngen.diagnostics import Diagnostic
from attngen.spec import mistakes
from attngen.spec.affine import AffineForm, difference
from attngen.spec.attention import SIZES, AttentionSpec, S
from attngen.spec.bounds import Range, range_of
from attngen.spec.expr import Apply, Const, Expr, ExpressionError, Name, Type, name, names_in, walk
from attngen.spec.obligations import EXTENTS, MAX_PART
from attngen.spec.operator import FALSE, TRUE, Interval
from attngen.spec.print_attn import expression_to_text
from attngen.spec.ranges import element_ranges, name_ranges
from attngen.spec.scales import default_scale

NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
LIMITS = {"lt": (-math.inf, -1), "le": (-math.inf, 0), "gt": (1, math.inf), "ge": (0, math.inf), "eq": (0, 0), "ne": (0, 0)}
MAX_MASK = 400  # nodes of a mask that is looked at
SAME = 1e-6  # relative: two factors that a person means as one


def suspicions(spec: AttentionSpec) -> Iterator[Diagnostic]:
    """The warnings about `spec`."""
    if spec.mask is not None and spec.mask.size <= MAX_MASK:
        yield from _of_mask(spec, spec.mask)
    if "s" not in names_in(spec.score):
        yield mistakes.WithoutProduct(statement="score")
    elif _repeats_scale(spec):
        yield mistakes.ScaledTwice(statement="score", scale=f"{default_scale(spec.head_dim):g}")


def _of_mask(spec: AttentionSpec, mask: Expr) -> Iterator[Diagnostic]:
    """Whether the mask has one value for all pairs of all calls, and by which of its conditions."""
    known = Conditions(spec)
    try:
        value = known.value(mask)
        if value is not None and not isinstance(mask, Const):  # `true` is meant
            cause = next(node for node in walk(mask) if node.type is Type.BOOL and known.value(node) is value)
            kind = mistakes.AlwaysTrue if value else mistakes.NeverTrue
            yield kind(statement="mask", why=_why(cause, value))
    except ExpressionError:  # an integer that might not fit 64 bits is a mistake
        return


def _why(cause: Expr, value: bool) -> str:
    text = expression_to_text(cause)
    shown = f"`{text}`" if len(text) <= MAX_PART else "it"
    if isinstance(cause, Apply) and len(cause.args) == 2 and cause.args[0] is cause.args[1]:
        return f"{shown} compares a value with itself"
    return f"{shown} is {'true' if value else 'false'} for every pair"


def _repeats_scale(spec: AttentionSpec) -> bool:
    """Whether the score multiplies `s`, or a sum with it, by 1 / sqrt(head_dim), which is the scale too, and nothing by
    sqrt(head_dim), as a soft-cap of that size does. Other factors are temperatures."""
    usual = default_scale(spec.head_dim)
    if not (isinstance(spec.scale, Const) and math.isclose(spec.scale.value, usual, rel_tol=SAME)):
        return False
    found = False
    for node in walk(spec.score):
        match node:
            case Apply(op="mul", args=(Const(value=factor), other)) | Apply(op="mul", args=(other, Const(value=factor))):
                pass
            case Apply(op="div", args=(other, Const(value=divisor))) if divisor:
                factor = 1 / divisor
            case _:
                continue
        if math.isclose(factor * usual, 1, rel_tol=SAME):
            return False
        is_sum = isinstance(other, Apply) and other.op in ("add", "sub") and S in other.args
        found |= (other is S or is_sum) and math.isclose(factor, usual, rel_tol=SAME)
    return found


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

    def _may_be(self, condition: Expr, value: bool) -> bool:
        """Whether the comparisons that `condition` implies if it has `value` may hold of one pair."""
        limits: dict[AffineKey, Range] = {}
        for op, form in _implied(condition, value):
            key, sign = _key(form)
            low, high = limits.get(key) or self._range(dict(key))
            least, most = sorted(sign * (end - form.offset) for end in LIMITS[op])
            if op == "ne":
                if low == high == least:
                    return False
                continue
            limits[key] = low, high = max(low, least), min(high, most)
            if low > high:
                return False
        return True

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
