"""The walk over tiles: the mask's class of each tile of one head, and the order in which a block of rows visits them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from attngen.drawings.picture import Picture, number

MOST = 64  # rows and columns that are drawn
LARGEST, ROOM, ROOM_BELOW = 34.0, 560.0, 420.0  # side of a tile at most; of all columns, and of all rows
NUMBERED = 17.0  # side of a tile from which on its number is legible


@dataclass(frozen=True, slots=True)
class TileMap:
    """The tiles of one head, by blocks of rows: `kinds[block][tile]` is empty, partial or full.

    The first block lacks `missing` rows. `ascending`: a block visits its tiles from the first to the last, or the other way.
    `counts` are of all tiles, of which `kinds` may have the first ones only.
    """

    kinds: tuple[tuple[str, ...], ...]
    block_q: int
    block_kv: int
    missing: int
    ascending: bool
    counts: dict[str, int]

    @property
    def is_whole(self) -> bool:
        return sum(map(len, self.kinds)) == sum(self.counts.values())

    @property
    def rows(self) -> int:
        return len(self.kinds)

    @property
    def columns(self) -> int:
        return len(self.kinds[0]) if self.kinds else 0

    def order(self, block: int) -> dict[int, int]:
        """The visited tiles of a block, and when each has its turn, from 1 on."""
        visited = [tile for tile, kind in enumerate(self.kinds[block]) if kind != "empty"]
        return {tile: i for i, tile in enumerate(visited if self.ascending else reversed(visited), 1)}

    def runs(self, block: int) -> Iterator[tuple[int, int, str]]:
        """Neighbouring tiles of one kind: (first, how many, kind)."""
        for kind, group in groupby(enumerate(self.kinds[block]), key=lambda pair: pair[1]):
            first, *others = [tile for tile, _ in group]
            yield first, 1 + len(others), kind

    def words(self, block: int, first: int, count: int, kind: str) -> str:
        """Which rows and keys a run of tiles has."""
        row, key = block * self.block_q - self.missing, first * self.block_kv
        rows = f"rows {max(row, 0)} to {row + self.block_q - 1}"
        return f"{rows}, keys {key} to {key + count * self.block_kv - 1}: {kind}"


def tiles_picture(found: TileMap, title: str, room: float = ROOM) -> Picture:
    """A row of squares for each block of rows, a column for each tile of keys; `room` is the width of all columns at most."""
    order = "from the first to the last" if found.ascending else "from the last to the first"
    says = (
        f"A square is a tile of {found.block_q} rows by {found.block_kv} keys. {found.counts['full']} are full, "
        f"{found.counts['partial']} partial, {found.counts['empty']} empty. A block of rows visits its tiles {order}"
    )
    side = min(LARGEST, room / max(found.columns, 1), ROOM_BELOW / max(found.rows, 1))
    numbered = side >= NUMBERED
    says += "; numbers are the order." if numbered else "."
    if not found.is_whole:
        says += f" Drawn are the first {found.rows} x {found.columns} tiles."
    drawn = Picture(title, says)
    left, top = 60.0, 18.0
    drawn.text(left, 12.0, "keys →", "quiet")
    drawn.text(0.0, top + 12.0, "rows ↓", "quiet")
    for block in range(found.rows):
        y = top + block * side
        for first, count, kind in found.runs(block):
            drawn.rect(left + first * side, y, count * side, side, kind, found.words(block, first, count, kind))
        for tile, turn in found.order(block).items() if numbered else ():
            drawn.text(left + (tile + 0.5) * side, y + side / 2 + 4.0, str(turn), "on-bar", "middle")
    right, bottom = left + found.columns * side, top + found.rows * side
    across = "".join(f"M{number(left)} {number(top + i * side)}H{number(right)}" for i in range(found.rows + 1))
    down = "".join(f"M{number(left + i * side)} {number(top)}V{number(bottom)}" for i in range(found.columns + 1))
    drawn.path(across + down, "cut")
    words = (("full", "full: no mask code"), ("partial", "partial: the mask for each pair"), ("empty", "empty: never loaded"))
    if room < ROOM:
        for i, entry in enumerate(words):
            drawn.legend(left, bottom + 22.0 + 18.0 * i, entry)
    else:
        drawn.legend(left, bottom + 22.0, *words)
    return drawn
