"""Spans: the least and the greatest element of captured vectors over each tile, which a pre-pass kernel computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from attngen.plan.axes import Axis
from attngen.spec.expr import Expr, Gather, Type, constant, gather, rewrite
from attngen.spec.operator import add, apply, floordiv, minimum, mul

Index = Literal["q", "k", "qk"]  # the last: for tiles of rows and of keys alike, which are equally long
MOST_TILES = 2  # tiles of a block whose spans are read instead of a span of the block itself


@dataclass(frozen=True, slots=True)
class Span:
    """The least and greatest element of a captured vector over each tile.

    `input` is read at dimension `dim` by the index q or k itself, or by both; its other indices depend on neither. The
    pre-pass writes tensors `<name>.min` and `<name>.max` of shape [the other dimensions..., number of tiles].
    """

    input: str
    dim: int
    index: Index
    rank: int

    @property
    def name(self) -> str:
        suffix = "" if self.dim == self.rank - 1 else str(self.dim)
        return f"{self.input}.{self.index}{suffix}"

    @property
    def ends(self) -> tuple[str, str]:
        return f"{self.name}.min", f"{self.name}.max"


class SharedSpans:
    """Spans of the tiles of `axis` that also serve for the blocks of the other axis.

    A vector that both q and k index needs one span instead of two if a block has the indices of at most MOST_TILES tiles.
    `block` and `tile` are their lengths.
    """

    def __init__(self, spans: tuple[Span, ...], axis: Axis, block: int, tile: int) -> None:
        self._block_axis, self._tile = axis.other, tile
        self._several, rest = divmod(block, tile)
        self._shared: dict[Span, Span] = {}
        if rest == 0 and self._several <= MOST_TILES:
            index: Index = "qk" if self._several == 1 else axis.index
            twice = [s for s in spans if {replace(s, index="q"), replace(s, index="k")} <= {*spans}]
            self._shared = {s: replace(s, index=index) for s in twice}
        self.spans = tuple(dict.fromkeys(self._shared.get(s, s) for s in spans))
        self._read = {end: (span, place) for span in self._shared for place, end in enumerate(span.ends)}

    def applied(self, expr: Expr) -> Expr:
        """`expr`, which reads shared spans instead of those that they replace."""
        return rewrite(expr, self._replaced) if self._shared else expr

    def _replaced(self, node: Expr) -> Expr | None:
        if not isinstance(node, Gather) or node.input not in self._read:
            return None
        span, place = self._read[node.input]
        *others, tile = node.args
        end = self._shared[span].ends[place]
        tiles = self._tiles_of_block() if span.index == self._block_axis.index and self._several > 1 else [tile]
        read: list[Expr] = [gather(end, node.type, (*others, tile)) for tile in tiles]
        operator = ("and", "or")[place] if node.type is Type.BOOL else ("min", "max")[place]
        return reduce(lambda left, right: apply(operator, left, right), read)

    def _tiles_of_block(self) -> list[Expr]:
        """The numbers of the tiles that a block's indices lie in, none past the last index."""
        first, last = mul(constant(self._several), self._block_axis.tile), floordiv(self._block_axis.hi, constant(self._tile))
        return [first, *(minimum(add(first, constant(i)), last) for i in range(1, self._several))]
