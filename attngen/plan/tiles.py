"""Tile classification: which key/value tiles a block of query rows needs, found from the mask alone.

For the tile q in [q_lo, q_hi], k in [k_lo, k_hi] the mask evaluated in interval arithmetic says

    empty    no pair is allowed          `may` is false      never loaded
    full     every pair is allowed       `must` is true      no mask code
    partial  anything else                                   the mask is evaluated for every pair

Comparisons that are affine in k are solved for k, which bounds the loop over tiles in closed form:

    kv_begin .. kv_end      outside it no pair of the row block is allowed (the hull)
    full_begin .. full_end  inside it every pair is allowed; None where only the test per tile can tell

Everything here is an `Expr` over `q_lo q_hi k_lo k_hi b h`, sizes, params and captured tensors. The emitter prints these
expressions into the kernels and the tests evaluate the same ones, so there is one classification. It may call a tile
partial that is not; it never calls one empty or full that is not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

from attngen.plan.facts import fact
from attngen.plan.normal_form import (
    FLIPPED,
    AffineForm,
    affine_form,
    conjuncts,
    connected,
    is_connection,
    normalized,
    sub_affine,
)
from attngen.plan.tables import of_table, reads_blocks, reads_tables
from attngen.spec.attention import AttentionSpec
from attngen.spec.bounds import Range, intervals, range_of
from attngen.spec.dtypes import FP16
from attngen.spec.expr import (
    MAX_LENGTH,
    Apply,
    Const,
    Expr,
    ExpressionError,
    Gather,
    Type,
    constant,
    gather,
    inputs_in,
    name,
    names_in,
    rewrite,
    walk,
)
from attngen.spec.obligations import DIVISIONS
from attngen.spec.operator import (
    EVERY_VALUE,
    ONE,
    TABLE,
    TRUE,
    ZERO,
    Interval,
    add,
    apply,
    floordiv,
    maximum,
    minimum,
    mul,
    where,
)
from attngen.spec.ranges import element_ranges, name_ranges

Index = Literal["q", "k", "qk"]  # the last where tiles of both are as long

# Symbols of a tile; the dot keeps them apart from every name that a spec may use.
Q_LO, Q_HI, K_LO, K_HI = (name(n, Type.INT) for n in ("q.lo", "q.hi", "k.lo", "k.hi"))
Q_TILE, K_TILE = name("q.tile", Type.INT), name("k.tile", Type.INT)
Q, K, KV_LEN = name("q", Type.INT), name("k", Type.INT), name("kv_len", Type.INT)
LARGEST = 4096  # nodes of a bound: of a larger one nothing is told, it would take compilers longer than all the rest
MOST_DIVISIONS = 64  # of a bound, for the same reason
MOST_BESIDE = 2  # tiles of keys beside a tile of rows, whose ranges are read for it
TILE = {"q": Interval(Q_LO, Q_HI), "k": Interval(K_LO, K_HI)}
ROWS = {"q": Interval(Q_LO, Q_HI)}
TILE_RANGES = {n.name: (0, MAX_LENGTH - 1) for n in (Q_LO, Q_HI, K_LO, K_HI, Q_TILE, K_TILE)}


@dataclass(frozen=True, slots=True)
class Span:
    """The least and greatest element of a captured vector over each tile: what the pre-pass computes.

    `input` is read at dimension `axis` by the index q or k itself, or by both; its other indices depend on neither. The
    pre-pass writes tensors `<name>.min` and `<name>.max` of shape [the other dimensions..., number of tiles].
    """

    input: str
    axis: int
    index: Index
    rank: int

    @property
    def name(self) -> str:
        suffix = "" if self.axis == self.rank - 1 else str(self.axis)
        return f"{self.input}.{self.index}{suffix}"


class KRange(NamedTuple):
    """Keys from `begin` up to but not including `end`."""

    begin: Expr
    end: Expr


class Solved(NamedTuple):
    """What is known of the keys that a condition allows: `hull` holds all of them; all of `full` are allowed."""

    hull: KRange
    full: KRange | None


ALL_KEYS = KRange(ZERO, KV_LEN)


@dataclass(frozen=True, slots=True)
class TileBounds:
    """The classification of one mask; see the module's text."""

    kv_begin: Expr = ZERO
    kv_end: Expr = KV_LEN
    full_begin: Expr | None = ZERO
    full_end: Expr | None = KV_LEN
    may: Expr = TRUE
    must: Expr = TRUE
    spans: tuple[Span, ...] = ()
    rest: Expr | None = None  # of a mask per tile: what is left to ask of a pair whose key is in the hull of its row alone

    @property
    def per_tile(self) -> bool:
        """Whether the loop has to test each tile, because full tiles are not one closed-form range."""
        return self.full_begin is None

    @property
    def by_row(self) -> bool:
        """Whether the mask allows each row one range of keys, which the closed forms give for a block of that row alone."""
        return _by_row(self)

    def ranged_once(self, block_q: int, block_kv: int) -> TileBounds:
        """The same for tiles of `block_q` rows and `block_kv` keys. Where rows are whole tiles of keys, and few, a vector that
        q and k index alike is ranged once, for tiles of keys; the range of rows is that of the tiles beside them."""
        several, rest = divmod(block_q, block_kv)
        if rest or several > MOST_BESIDE:
            return self
        once = {
            s: replace(s, index="qk" if several == 1 else "k")
            for s in self.spans
            if {replace(s, index="q"), replace(s, index="k")} <= {*self.spans}
        }
        if not once:
            return self
        joint_of = {f"{s.name}.{end}": (joint, end, s.index) for s, joint in once.items() for end in ("min", "max")}

        def renamed(node: Expr) -> Expr | None:
            if not isinstance(node, Gather) or node.input not in joint_of:
                return None
            joint, end, index = joint_of[node.input]
            tiles = [node.args[-1]]
            if index == "q" and several > 1:
                first, last = mul(constant(several), Q_TILE), floordiv(Q_HI, constant(block_kv))
                tiles = [first, *(minimum(add(first, constant(i)), last) for i in range(1, several))]
            read: list[Expr] = [gather(f"{joint.name}.{end}", node.type, (*node.args[:-1], tile)) for tile in tiles]
            operator = {"min": "and", "max": "or"}[end] if node.type is Type.BOOL else end
            return reduce(lambda left, right: apply(operator, left, right), read)

        exprs: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "spans"}
        exprs = {field: None if expr is None else rewrite(expr, renamed) for field, expr in exprs.items()}
        return TileBounds(**exprs, spans=tuple(dict.fromkeys(once.get(s, s) for s in self.spans)))

    @property
    def even(self) -> bool:
        """Whether every block of rows has the same keys to visit, as far as the closed forms tell."""
        return _even(self)


@fact
def _by_row(bounds: TileBounds) -> bool:
    if bounds.full_begin is None or bounds.full_end is None:
        return False
    return _is_row_range(Solved(KRange(bounds.kv_begin, bounds.kv_end), KRange(bounds.full_begin, bounds.full_end)))


@fact
def _even(bounds: TileBounds) -> bool:
    read = names_in(bounds.kv_begin, bounds.kv_end)
    return not bounds.per_tile and not read & {Q_LO.name, Q_HI.name, Q_TILE.name}


def _of_one_row(node: Expr) -> Expr | None:
    return Q if node in (Q_LO, Q_HI) else None


@fact
def tile_bounds(spec: AttentionSpec, tile: tuple[int, int] | None = None) -> TileBounds:
    """The classification of `spec`'s mask: of tiles of any size, or of those of `tile`, rows and keys, which begin at multiples
    of these."""
    if spec.mask is None:
        return TileBounds()
    alone = AttentionSpec(
        "mask", FP16, 64, 64, ONE, spec.q_heads, spec.kv_heads, inputs=spec.inputs, params=spec.params, mask=spec.mask
    )
    # One for all specs with this mask, whatever else they say
    return _of_mask(alone, tile if reads_tables(spec.mask) else None)


@fact
def _of_mask(spec: AttentionSpec, tile: tuple[int, int] | None) -> TileBounds:
    assert spec.mask is not None
    return _Classifier(spec, tile).classify(normalized(spec.mask))


class _Classifier:
    """The analysis of one mask. Each term is analysed once."""

    def __init__(self, spec: AttentionSpec, tile: tuple[int, int] | None = None) -> None:
        self.spans: dict[Span, None] = {}
        self._tile = tile
        self._names = name_ranges(spec) | TILE_RANGES
        self._elements = element_ranges(spec)
        self._ranges: dict[Expr, Interval] = {}
        self._over_tile: dict[Expr, Interval] = {}
        self._over_rows: dict[Expr, Interval] = {}
        self._solved: dict[Expr, Solved] = {}

    def classify(self, mask: Expr) -> TileBounds:
        may_must = self._tile_interval(mask)
        hull, full = self._solve(mask)
        begin, end = self._index(maximum(ZERO, hull.begin)), self._index(minimum(KV_LEN, hull.end))
        if full is None:
            read = self._spans_of(begin, end, *may_must)
            return TileBounds(begin, end, None, None, may_must.hi, may_must.lo, read, self._rest(mask))
        full_begin, full_end = self._index(maximum(ZERO, full.begin)), self._index(minimum(KV_LEN, full.end))
        read = self._spans_of(begin, end, full_begin, full_end)
        return TileBounds(begin, end, full_begin, full_end, may_must.hi, may_must.lo, read)

    def _spans_of(self, *read: Expr) -> tuple[Span, ...]:
        """Those that these expressions read."""
        inputs = inputs_in(*read)
        return tuple(s for s in self.spans if inputs & {f"{s.name}.min", f"{s.name}.max"})

    # --- intervals over a tile or a block of rows

    def _tile_interval(self, mask: Expr) -> Interval:
        """When some pair of a tile, and when every pair, is allowed. A term of which nothing can be told leaves the others."""
        found: dict[Expr, Interval] = {}
        for term in connected(mask):
            try:
                if is_connection(term):
                    found[term] = TABLE[term.op].bounds(*(found[a] for a in term.args))
                else:
                    found[term] = self._interval(term, TILE, self._over_tile)
                    for end in found[term]:
                        self._range(end)
            except ExpressionError:  # an integer might not fit 64 bits
                found[term] = EVERY_VALUE[Type.BOOL]
            if _is_large(found[term]):
                found[term] = EVERY_VALUE[Type.BOOL]
        return found[mask]

    def _row_interval(self, expr: Expr) -> Interval:
        """Over the rows of a block, for an expression without k."""
        try:
            return self._interval(expr, ROWS, self._over_rows)
        except ExpressionError:  # a bound does not fit 64 bits
            return EVERY_VALUE[expr.type]

    def _interval(self, expr: Expr, tile: dict[str, Interval], memo: dict[Expr, Interval]) -> Interval:
        element = self._element if tile is TILE else self._vector_element
        return intervals(expr, lambda n: tile.get(n.name, Interval(n, n)), element, memo)[expr]

    def _element(self, node: Gather, indices: tuple[Interval, ...]) -> Interval:
        if reads_blocks(node):
            return of_table(node, indices, self._every_value(node), self._tile)
        return self._vector_element(node, indices)

    def _vector_element(self, node: Gather, indices: tuple[Interval, ...]) -> Interval:
        moving = [axis for axis, index in enumerate(node.args) if names_in(index) & {"q", "k"}]
        if not moving:
            return Interval(node, node)
        axis = moving[0]
        if len(moving) > 1 or node.args[axis] not in (Q, K):
            return self._every_value(node)
        index: Index = "q" if node.args[axis] is Q else "k"
        span = Span(node.input, axis, index, len(node.args))
        self.spans[span] = None
        ends = f"{span.name}.min", f"{span.name}.max"
        if node.input in self._elements:
            self._elements |= dict.fromkeys(ends, self._elements[node.input])
        others = (*node.args[:axis], *node.args[axis + 1 :], Q_TILE if index == "q" else K_TILE)
        return Interval(*(gather(end, node.type, others) for end in ends))

    def _every_value(self, node: Gather) -> Interval:
        known = self._elements.get(node.input)
        return EVERY_VALUE[node.type] if known is None else Interval(constant(known[0]), constant(known[1]))

    # --- closed forms

    def _solve(self, mask: Expr) -> Solved:
        for term in connected(mask):
            if term in self._solved:
                continue
            known = [self._solved[a] for a in term.args] if is_connection(term) else []
            solved = _combine(term.op, *known) if is_connection(term) else self._solve_term(term)
            large = _is_large(solved.hull) or (solved.full is not None and _is_large(solved.full))
            self._solved[term] = Solved(ALL_KEYS, None) if large else solved
        return self._solved[mask]

    def _solve_term(self, term: Expr) -> Solved:
        if reads_tables(term):
            return Solved(ALL_KEYS, None)
        if "k" not in names_in(term):
            condition = self._row_interval(term)
            return Solved(KRange(ZERO, where(condition.hi, KV_LEN, ZERO)), KRange(ZERO, where(condition.lo, KV_LEN, ZERO)))
        if isinstance(term, Apply) and term.op in FLIPPED and term.args[0].type is Type.INT:
            solved = self._solve_comparison(term)
            if solved is not None and self._fits(solved):
                return solved
        return Solved(ALL_KEYS, None)

    def _rest(self, mask: Expr) -> Expr:
        """What of `mask`, which has no closed form, the hull of a single row does not say already."""
        rest = [term for term in conjuncts(mask) if not _is_row_range(self._solve(term))]
        return reduce(lambda left, right: apply("and", left, right), rest)

    def _solve_comparison(self, expr: Apply) -> Solved | None:
        form = affine_form(sub_affine(affine_form(expr.args[0]), affine_form(expr.args[1])))
        slope = form.coefficients.pop(K, 0)
        if slope == 0 or "k" in names_in(*form.coefficients):
            return None
        match expr.op:
            case "ge":
                return self._at_least(slope, form)
            case "gt":
                return self._at_least(slope, form.shifted(-1))
            case "le":
                return self._at_least(-slope, form.negated())
            case "lt":
                return self._at_least(-slope, form.negated().shifted(-1))
            case "eq":
                low = self._at_least(slope, form)
                high = self._at_least(-slope, form.negated())
                return _combine("and", low, high)
        return None

    def _at_least(self, slope: int, rest: AffineForm) -> Solved:
        """The keys with `slope * k + rest >= 0`."""
        if slope > 0:  # k >= ceil(-rest / slope)
            bound = self._row_interval(rest.negated().shifted(slope - 1).to_expr())
            divisor = constant(slope)
            return Solved(
                KRange(floordiv(bound.lo, divisor), KV_LEN),
                KRange(floordiv(bound.hi, divisor), KV_LEN),
            )
        bound = self._row_interval(rest.shifted(-slope).to_expr())  # k < floor(rest / -slope) + 1
        divisor = constant(-slope)
        return Solved(KRange(ZERO, floordiv(bound.hi, divisor)), KRange(ZERO, floordiv(bound.lo, divisor)))

    def _fits(self, solved: Solved) -> bool:
        """Whether every integer of the closed forms surely fits 64 bits."""
        try:
            for k_range in solved:
                for end in k_range or ():
                    self._range(end)
        except ExpressionError:
            return False
        return True

    def _range(self, expr: Expr) -> Range:
        return range_of(expr, self._names, self._elements, self._ranges)

    def _index(self, end: Expr) -> Expr:
        """`end` kept within the keys where it might not fit the int that counts them."""
        low, high = self._range(end)
        if high > MAX_LENGTH:
            end = minimum(end, KV_LEN)
        return maximum(end, ZERO) if low < -MAX_LENGTH else end


def _is_large(ends: tuple[Expr, ...]) -> bool:
    """Whether the compiler would take seconds for bounds like these."""
    size = max(end.size for end in ends)
    return size > LARGEST or (size > MOST_DIVISIONS and _divisions(*ends) > MOST_DIVISIONS)


def _divisions(*exprs: Expr) -> int:
    """By what is no constant: each is some twenty instructions and a branch."""
    return sum(isinstance(n, Apply) and n.op in DIVISIONS and not isinstance(n.args[1], Const) for n in walk(*exprs))


def _is_row_range(solved: Solved) -> bool:
    """Whether a single row is allowed the keys of the hull, and no others."""
    if solved.full is None:
        return False
    hull, full = ([rewrite(e, _of_one_row) for e in keys] for keys in (solved.hull, solved.full))
    return hull == full and Q_TILE.name not in names_in(*hull)


def _combine(op: str, left: Solved, right: Solved) -> Solved:
    if op == "or":
        hull = KRange(minimum(left.hull.begin, right.hull.begin), maximum(left.hull.end, right.hull.end))
        return Solved(hull, None)
    hull = KRange(maximum(left.hull.begin, right.hull.begin), minimum(left.hull.end, right.hull.end))
    if left.full is None or right.full is None:
        return Solved(hull, None)
    return Solved(hull, KRange(maximum(left.full.begin, right.full.begin), minimum(left.full.end, right.full.end)))
