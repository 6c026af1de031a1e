"""Mask bounds: which tiles a block has to visit, found from the mask alone.

The mask evaluated in interval arithmetic over the tile q in [q_lo, q_hi], k in [k_lo, k_hi] says

    empty    no pair is allowed          `may` is false      never loaded
    full     every pair is allowed       `must` is true      no mask code
    partial  anything else                                   the mask is evaluated for every pair

Comparisons that are affine in an index are solved for it, which bounds the loop over tiles in closed form:

    begin .. end            outside it no pair of the block is allowed (the hull)
    full_begin .. full_end  inside it every pair is allowed; None if only the test per tile can tell

Solved for k, these are keys, for a block of rows; solved for q, they are rows, for a block of keys.

All bounds are an `Expr` over `q_lo q_hi k_lo k_hi b h`, sizes, params and captured tensors. The emitter prints these
expressions into the kernels and the tests evaluate the same ones, so there is one classification. A tile may be called partial
that is not; none is ever called empty or full that is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Literal

from attngen.plan.axes import AXES, KEYS, ROWS, Axis
from attngen.plan.closed_forms import ClosedForms, IndexRange
from attngen.plan.memo import remembered
from attngen.plan.normal_form import conjuncts, normalized
from attngen.plan.spans import SharedSpans, Span
from attngen.plan.tables import Tile, reads_tables
from attngen.plan.tile_intervals import TileIntervals
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP16
from attngen.spec.evaluate import Computed, on_numbers
from attngen.spec.expr import MAX_LENGTH, Expr, inputs_in, names_in
from attngen.spec.operator import ONE, TRUE, ZERO, both, maximum, minimum

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True)
class MaskBounds:
    """The classification of one mask for blocks that visit tiles of `axis`: of keys, or of rows. See the module's text."""

    begin: Expr = ZERO
    end: Expr = KEYS.length
    full_begin: Expr | None = ZERO
    full_end: Expr | None = KEYS.length
    may: Expr = TRUE
    must: Expr = TRUE
    spans: tuple[Span, ...] = ()
    residual: Expr = TRUE  # conjuncts of the mask that [begin, end) of a single row (of a single key, for rows) does not imply
    axis: Axis = KEYS

    @property
    def per_tile(self) -> bool:
        """Whether the loop has to test each tile, because full tiles are not one closed-form range."""
        return self.full_begin is None

    @property
    def exact(self) -> bool:
        """Whether the mask allows a row the keys in its [begin, end) and no others; for rows: a key the rows."""
        return self.residual is TRUE

    @cached_property
    def uniform(self) -> bool:
        """Whether every block visits the same indices, as far as the closed forms tell."""
        return not self.per_tile and not names_in(self.begin, self.end) & self.axis.other.block_names

    def visited(self, first: ndarray, last: ndarray, q_len: int, kv_len: int, tile: ndarray | int = 1) -> ndarray | None:
        """How many keys blocks of rows from `first` to `last` visit, in whole tiles of so many keys; by bounds that are solved
        for rows, how many rows blocks of keys visit. The arrays broadcast.

        None if the closed forms read more than lengths.
        """
        import numpy as np

        block, ends = self.axis.other, self._ends
        if ends is None:
            return None
        at = {ROWS.length.name: q_len, KEYS.length.name: kv_len, block.lo.name: first, block.hi.name: last}
        with np.errstate(divide="ignore"):  # by a length of 0
            begin, end = ends(at)
        found: ndarray = np.where(end > begin, -(-end // tile) - begin // tile, 0) * tile
        return found

    @cached_property
    def _ends(self) -> Computed | None:
        """`begin` and `end` on arrays, if they read nothing but lengths and a block's first and last index."""
        import numpy as np

        ends, block = (self.begin, self.end), self.axis.other
        known = {n.name for n in (ROWS.length, KEYS.length, block.lo, block.hi)}
        return on_numbers(*ends, xp=np) if names_in(*ends) <= known and not inputs_in(*ends) else None


@remembered
def mask_bounds(spec: AttentionSpec, tile: Tile | None = None, solve: Literal["q", "k"] = "k") -> MaskBounds:
    """The classification of `spec`'s mask, with closed forms for the index `solve`.

    It serves tiles of any size. With `tile` (rows, keys), it serves tiles of that size, which begin at multiples of it: it may
    know more of them, and read fewer spans.
    """
    axis = AXES[solve]
    if spec.mask is None:
        return MaskBounds(end=axis.length, full_end=axis.length, axis=axis)
    # One analysis serves all specs with this mask, whatever else they say.
    alone = AttentionSpec(
        "mask", FP16, 64, 64, ONE, spec.q_heads, spec.kv_heads, inputs=spec.inputs, params=spec.params, mask=spec.mask
    )
    bounds = _of_mask(alone, axis, tile if reads_tables(spec.mask) else None)
    if tile is None:
        return bounds
    rows, keys = tile
    return _with_shared_spans(bounds, *((rows, keys) if solve == "k" else (keys, rows)))


@remembered
def _of_mask(spec: AttentionSpec, axis: Axis, tile: Tile | None) -> MaskBounds:
    assert spec.mask is not None
    intervals = TileIntervals(spec, axis.other, tile)
    mask = normalized(spec.mask, intervals.fits)
    forms = ClosedForms(axis, intervals)

    def inside(indices: IndexRange) -> IndexRange:
        """`indices` without those before the first and past the last: 0 <= begin and 0 <= end <= length, so that the number of
        a tile fits an int and no tile has a negative one, even if there is none. `begin` may be past `end`, and past the length
        if it fits an int."""
        begin, end = indices.begin, minimum(axis.length, indices.end)
        low, high = intervals.range(begin)
        begin = maximum(ZERO, begin) if low < 0 else begin
        begin = minimum(begin, axis.length) if high > MAX_LENGTH else begin
        return IndexRange(begin, maximum(end, ZERO) if intervals.range(end)[0] < 0 else end)

    must, may = intervals.of_mask(mask)
    hull, full = forms.solve(mask)
    begin, end = inside(hull)
    full_begin, full_end = (None, None) if full is None else inside(full)
    remaining = [term for term in conjuncts(mask) if not forms.solve(term).is_exact(axis.other)]
    residual = reduce(both, remaining) if remaining else TRUE
    tests = (may, must) if full_begin is None or full_end is None else (full_begin, full_end)
    return MaskBounds(begin, end, full_begin, full_end, may, must, intervals.spans(begin, end, *tests), residual, axis)


def _with_shared_spans(bounds: MaskBounds, block: int, tile: int) -> MaskBounds:
    """`bounds` with spans that serve both axes, for blocks and tiles of these lengths."""
    shared = SharedSpans(bounds.spans, bounds.axis, block, tile)
    if shared.spans == bounds.spans:
        return bounds
    full_begin, full_end = (None if e is None else shared.applied(e) for e in (bounds.full_begin, bounds.full_end))
    begin, end, may, must = map(shared.applied, (bounds.begin, bounds.end, bounds.may, bounds.must))
    return MaskBounds(begin, end, full_begin, full_end, may, must, shared.spans, bounds.residual, bounds.axis)
