"""The tiles of the Hopper kernel: which are preferred, and which of them suits the lengths of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from attngen.plan.tile import Tile
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS


def tile(consumers: int, block_kv: int, stages: int) -> Tile:
    return Tile(WARPGROUP_ROWS * consumers, block_kv, stages, 4 * (consumers + 1))


def consumers(tile: Tile) -> int:
    """Warpgroups that multiply."""
    return tile.warps // 4 - 1


# By the larger head size; the first that fits is taken where the lengths of a call are not known.
PREFERRED: dict[int, tuple[Tile, ...]] = {
    64: (tile(2, 128, 3), tile(2, 96, 3)),
    80: (tile(3, 64, 3), tile(2, 128, 2), tile(2, 96, 2)),
    96: (tile(3, 64, 3), tile(2, 128, 2), tile(2, 96, 2)),
    128: (tile(2, 128, 2), tile(2, 96, 2)),
    160: (tile(3, 64, 2), tile(2, 96, 2), tile(2, 80, 2)),
    192: (tile(2, 96, 2), tile(2, 80, 2), tile(2, 64, 2)),
    256: (tile(2, 64, 2), tile(2, 48, 2)),
}
POSSIBLE = (
    *(tile(c, kv, s) for c in (3, 2) for kv in (176, 160, 128, 112, 96, 80, 64, 48) for s in (4, 3, 2)),
    *(tile(4, kv, s) for kv in (80, 64, 48) for s in (4, 3, 2)),
)


# Any attention whose mask classifies tiles one by one; a softmax of scores as they are, under no mask or one that bounds keys
# from above; under one that allows each row a range of keys; a softmax of scores that are changed without a bound; any other.
MaskClass = Literal["classified", "plain", "window", "scored", "other"]
MASK_CLASSES: tuple[MaskClass, ...] = get_args(MaskClass)
ANY = "any"  # in timings.txt: all of them


@dataclass(frozen=True, slots=True)
class TileTiming:
    """How fast a tile is, beside the others of its head size: by the keys that a block of rows visits, and its cost on top.

    Fitted to times of single calls, of few heads and many, on an H200; then set so that rows of 4096 and more choose the tile
    that is the fastest in bursts of calls. `benchmarks/hopper.py --only lengths` shows what the choice loses to the fastest
    tile. Entries that serve classified tiles alone are older.
    """

    tile: Tile
    rate: float  # pairs per unit of time, in the steady loop
    overhead: int  # per block of rows, as if it visited so many keys more
    even_rate: float  # the same where all blocks visit as many keys
    even_overhead: int
    serves: tuple[MaskClass, ...]  # those for which no other tile was measured to be faster


@lru_cache(maxsize=1)
def timings() -> dict[int, tuple[TileTiming, ...]]:
    """By the larger head size, at most; the rows of timings.txt."""
    found: dict[int, tuple[TileTiming, ...]] = {}
    for line in Path(__file__).with_name("timings.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            head, groups, keys, stages, rate, overhead, even_rate, even_overhead, serves = line.split()
            timing = TileTiming(
                tile(int(groups), int(keys), int(stages)),
                float(rate),
                int(overhead),
                float(even_rate),
                int(even_overhead),
                tuple(c for c in MASK_CLASSES if serves == ANY or c in serves.split(",")),
            )
            found[int(head)] = (*found.get(int(head), ()), timing)
    return found
