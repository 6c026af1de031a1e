"""The two axes of the scores, rows and keys, with the symbols of a tile of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.spec.expr import MAX_LENGTH, Name, Type, name
from attngen.spec.operator import Interval


@dataclass(frozen=True, slots=True)
class Axis:
    """Rows or keys. The dot in a symbol's name keeps it apart from every name that a spec may use."""

    index: Literal["q", "k"]
    at: Name  # the index itself
    length: Name
    lo: Name  # least and greatest index of a tile
    hi: Name
    tile: Name  # number of a tile

    @property
    def other(self) -> Axis:
        return KEYS if self.index == "q" else ROWS

    @property
    def interval(self) -> Interval:
        return Interval(self.lo, self.hi)

    @property
    def block_names(self) -> frozenset[str]:
        """The names of a tile's symbols, which differ from block to block."""
        return frozenset((self.lo.name, self.hi.name, self.tile.name))


def _axis(index: Literal["q", "k"], length: str) -> Axis:
    return Axis(index, *(name(n, Type.INT) for n in (index, length, f"{index}.lo", f"{index}.hi", f"{index}.tile")))


ROWS, KEYS = _axis("q", "q_len"), _axis("k", "kv_len")
AXES: dict[str, Axis] = {axis.index: axis for axis in (ROWS, KEYS)}
MOVING = frozenset(AXES)  # indices that differ from pair to pair of a tile
TILE: dict[str, Interval] = {axis.index: axis.interval for axis in (ROWS, KEYS)}
TILE_RANGES = {symbol: (0, MAX_LENGTH - 1) for axis in (ROWS, KEYS) for symbol in axis.block_names}
