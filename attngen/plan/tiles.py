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

from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

from attngen.plan.facts import fact
from attngen.spec.attention import AttentionSpec
from attngen.spec.bounds import Range, interval, ranges
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
    name,
    names_in,
    rewrite,
)
from attngen.spec.operator import (
    EVERY_VALUE,
    TRUE,
    ZERO,
    Interval,
    add,
    apply,
    floordiv,
    maximum,
    minimum,
    mul,
    neg,
    negation,
    sub,
    where,
)
from attngen.spec.ranges import element_ranges, name_ranges

Index = Literal["q", "k", "qk"]  # the last where tiles of both are as long

# Symbols of a tile; the dot keeps them apart from every name that a spec may use.
Q_LO, Q_HI, K_LO, K_HI = (name(n, Type.INT) for n in ("q.lo", "q.hi", "k.lo", "k.hi"))
Q_TILE, K_TILE = name("q.tile", Type.INT), name("k.tile", Type.INT)
Q, K, KV_LEN = name("q", Type.INT), name("k", Type.INT), name("kv_len", Type.INT)
MOST_BESIDE = 2  # tiles of keys beside a tile of rows, whose ranges are read for it
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
def tile_bounds(spec: AttentionSpec) -> TileBounds:
    """The classification of `spec`'s mask."""
    if spec.mask is None:
        return TileBounds()
    return _Classifier(spec).classify(_normalized(spec.mask))


@dataclass(slots=True)
class _Classifier:
    spec: AttentionSpec
    spans: dict[Span, None] = field(default_factory=dict)

    def classify(self, mask: Expr) -> TileBounds:
        may_must = self._tile_interval(mask)
        hull, full = self._solve(mask)
        begin, end = self._index(maximum(ZERO, hull.begin)), self._index(minimum(KV_LEN, hull.end))
        if full is None:
            spans = tuple(self.spans)
            return TileBounds(begin, end, None, None, may_must.hi, may_must.lo, spans, self._rest(mask))
        full_begin, full_end = self._index(maximum(ZERO, full.begin)), self._index(minimum(KV_LEN, full.end))
        self.spans = {}
        self._solve(mask)  # only the spans that the closed forms read
        return TileBounds(begin, end, full_begin, full_end, may_must.hi, may_must.lo, tuple(self.spans))

    # --- intervals over a tile or a block of rows

    def _tile_interval(self, expr: Expr) -> Interval:
        return self._interval(expr, {"q": Interval(Q_LO, Q_HI), "k": Interval(K_LO, K_HI)})

    def _row_interval(self, expr: Expr) -> Interval:
        """Over the rows of a block, for an expression without k."""
        return self._interval(expr, {"q": Interval(Q_LO, Q_HI)})

    def _interval(self, expr: Expr, tile: dict[str, Interval]) -> Interval:
        try:
            return interval(expr, lambda n: tile.get(n.name, Interval(n, n)), self._element)
        except ExpressionError:  # a bound does not fit 64 bits
            return EVERY_VALUE[expr.type]

    def _element(self, node: Gather, indices: tuple[Interval, ...]) -> Interval:
        moving = [axis for axis, index in enumerate(node.args) if names_in(index) & {"q", "k"} or _reads_moving(index)]
        if not moving:
            return Interval(node, node)
        axis = moving[0]
        if len(moving) > 1 or node.args[axis] not in (Q, K):
            return EVERY_VALUE[node.type]
        index: Index = "q" if node.args[axis] is Q else "k"
        span = Span(node.input, axis, index, len(node.args))
        self.spans[span] = None
        others = (*node.args[:axis], *node.args[axis + 1 :], Q_TILE if index == "q" else K_TILE)
        return Interval(
            gather(f"{span.name}.min", node.type, others),
            gather(f"{span.name}.max", node.type, others),
        )

    # --- closed forms

    def _solve(self, expr: Expr) -> Solved:
        if isinstance(expr, Apply) and expr.op in ("and", "or"):
            return _combine(expr.op, *(self._solve(a) for a in expr.args))
        if "k" not in names_in(expr):
            condition = self._row_interval(expr)
            return Solved(KRange(ZERO, where(condition.hi, KV_LEN, ZERO)), KRange(ZERO, where(condition.lo, KV_LEN, ZERO)))
        if isinstance(expr, Apply) and expr.op in FLIPPED and expr.args[0].type is Type.INT:
            solved = self._solve_comparison(expr)
            if solved is not None and self._fits(solved):
                return solved
        return Solved(ALL_KEYS, None)

    def _rest(self, mask: Expr) -> Expr:
        """What of `mask`, which has no closed form, the hull of a single row does not say already."""
        rest = [term for term in _conjuncts(mask) if not _is_row_range(self._solve(term))]
        return reduce(lambda left, right: apply("and", left, right), rest)

    def _solve_comparison(self, expr: Apply) -> Solved | None:
        form = affine_form(sub_affine(affine_form(expr.args[0]), affine_form(expr.args[1])))
        slope = form.coefficients.pop(K, 0)
        if slope == 0 or any("k" in names_in(leaf) for leaf in form.coefficients):
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
        elements = element_ranges(self.spec)
        for span in self.spans:
            if span.input in elements:
                elements |= {f"{span.name}.min": elements[span.input], f"{span.name}.max": elements[span.input]}
        return ranges(expr, name_ranges(self.spec) | TILE_RANGES, elements)[expr]

    def _index(self, end: Expr) -> Expr:
        """`end` kept within the keys where it might not fit the int that counts them."""
        low, high = self._range(end)
        if high > MAX_LENGTH:
            end = minimum(end, KV_LEN)
        return maximum(end, ZERO) if low < -MAX_LENGTH else end


def _conjuncts(mask: Expr) -> list[Expr]:
    """The conditions that `mask` joins by `and`, in their order."""
    if isinstance(mask, Apply) and mask.op == "and":
        return [term for operand in mask.args for term in _conjuncts(operand)]
    return [mask]


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


def _reads_moving(index: Expr) -> bool:
    return any(isinstance(a, Gather) and names_in(a) & {"q", "k"} for a in (index, *index.args))


# --- normal form ----------------------------------------------------------------------------------------------------------

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
FLIPPED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _normalized(mask: Expr) -> Expr:
    """`mask` with negation pushed down to comparisons of integers, and those comparisons in normal form.

    In normal form each index occurs once, which makes the interval of an affine comparison exact. Comparisons of floats
    keep their negation, since `not (x < y)` is true of NaN and `x >= y` is not.
    """

    def push(node: Expr, negate: bool) -> Expr:
        if isinstance(node, Apply):
            if node.op == "not":
                return push(node.args[0], not negate)
            if node.op in ("and", "or"):
                op = node.op if not negate else {"and": "or", "or": "and"}[node.op]
                return apply(op, *(push(a, negate) for a in node.args))
            if node.op in FLIPPED and node.args[0].type is Type.INT:
                return _without_abs(FLIPPED[node.op] if negate else node.op, *node.args)
        return negation(node) if negate else node

    return rewrite(push(mask, False), _normal_comparison)


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
