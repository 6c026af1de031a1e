"""The tiles of the Hopper kernel: which are preferred, and which of them suits the lengths of a call."""

from __future__ import annotations

from dataclasses import dataclass
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
CLASSIFIED: tuple[MaskClass, ...] = ("classified",)
BOUNDED: tuple[MaskClass, ...] = ("plain", "window", "scored", "other")  # by closed forms
NO_WINDOW: tuple[MaskClass, ...] = ("plain", "scored", "other")
NOT_SCORED: tuple[MaskClass, ...] = ("plain", "window", "other")
PLAIN: tuple[MaskClass, ...] = ("plain",)


@dataclass(frozen=True, slots=True)
class TileTiming:
    """How fast a tile is, beside the others of its head size: by the keys that a block of rows visits, and its cost on top.

    Fitted to times of single calls, of few heads and many, on an H200; then set so that rows of 4096 and more choose the tile
    that is the fastest in bursts of calls. `benchmarks/hopper.py --only lengths` shows what the choice loses to the fastest
    tile. Entries of `CLASSIFIED` tiles are older.
    """

    tile: Tile
    rate: float  # pairs per unit of time, in the steady loop
    overhead: int  # per block of rows, as if it visited so many keys more
    even_rate: float  # the same where all blocks visit as many keys
    even_overhead: int
    serves: tuple[MaskClass, ...] = MASK_CLASSES  # those for which no other tile was measured to be faster


TIMINGS: dict[int, tuple[TileTiming, ...]] = {
    40: (
        TileTiming(tile(4, 64, 4), 1.0, 42, 1.0, 108),
        TileTiming(tile(4, 80, 3), 1.001, 48, 1.0, 107, PLAIN),
        TileTiming(tile(3, 96, 3), 0.972, 50, 0.954, 120, PLAIN),
        TileTiming(tile(3, 64, 3), 0.957, 54, 0.925, 111, NO_WINDOW),
        TileTiming(tile(2, 64, 3), 0.783, 96, 0.761, 100, BOUNDED),
        TileTiming(tile(2, 128, 3), 0.832, 170, 0.809, 122, NOT_SCORED),
        TileTiming(tile(2, 128, 3), 0.889, 13, 0.83, 48, CLASSIFIED),
    ),
    56: (
        TileTiming(tile(4, 64, 4), 1.0, 60, 1.0, 92),
        TileTiming(tile(4, 48, 4), 0.888, 22, 0.995, 102, PLAIN),
        TileTiming(tile(3, 128, 3), 0.98, 102, 1.0, 120, PLAIN),
        TileTiming(tile(3, 96, 3), 0.95, 52, 1.023, 136, PLAIN),
        TileTiming(tile(3, 64, 3), 0.92, 18, 0.974, 121, NO_WINDOW),
        TileTiming(tile(2, 64, 3), 0.754, 80, 0.832, 104, BOUNDED),
        TileTiming(tile(2, 128, 3), 0.803, 156, 0.818, 120, NOT_SCORED),
        TileTiming(tile(2, 128, 3), 0.951, 44, 0.956, 94, CLASSIFIED),
    ),
    64: (
        TileTiming(tile(4, 64, 4), 1.0, 3, 1.0, 70),
        TileTiming(tile(4, 48, 4), 0.982, 28, 0.987, 82, PLAIN),
        TileTiming(tile(3, 128, 3), 1.02, 60, 1.036, 165, PLAIN),
        TileTiming(tile(3, 96, 3), 0.985, 60, 1.022, 100, PLAIN),
        TileTiming(tile(3, 64, 3), 0.99, 12, 0.985, 101, NO_WINDOW),
        TileTiming(tile(2, 64, 3), 0.853, 84, 0.86, 108, BOUNDED),
        TileTiming(tile(2, 128, 3), 0.975, 215, 0.96, 95, NOT_SCORED),
        TileTiming(tile(2, 128, 3), 0.951, -13, 0.956, 72, CLASSIFIED),
    ),
    80: (
        TileTiming(tile(3, 64, 3), 1.0, 10, 1.0, 94, BOUNDED),
        TileTiming(tile(4, 48, 4), 1.0, 4, 1.021, 94, PLAIN),
        TileTiming(tile(3, 112, 2), 1.032, 42, 1.042, 95, PLAIN),
        TileTiming(tile(3, 80, 3), 1.011, 10, 1.035, 134, PLAIN),
        TileTiming(tile(2, 64, 3), 0.829, 72, 0.856, 98, BOUNDED),
        TileTiming(tile(2, 128, 2), 0.904, 154, 0.893, 114, NOT_SCORED),
        TileTiming(tile(2, 128, 2), 0.838, 0, 0.747, 0, CLASSIFIED),
    ),
    96: (
        TileTiming(tile(3, 64, 3), 1.0, -10, 1.0, 82, BOUNDED),
        TileTiming(tile(3, 96, 2), 1.045, 42, 1.017, 91, PLAIN),
        TileTiming(tile(2, 128, 2), 0.913, 140, 0.934, 124, (*PLAIN, *CLASSIFIED)),
        TileTiming(tile(2, 64, 3), 0.841, 54, 0.893, 96, BOUNDED),
    ),
    128: (
        TileTiming(tile(2, 128, 2), 1.0, 196, 1.0, 156),
        TileTiming(tile(3, 80, 3), 1.048, 22, 1.032, 82, PLAIN),
        TileTiming(tile(3, 64, 3), 1.063, 10, 1.011, 81, BOUNDED),
        TileTiming(tile(2, 64, 3), 0.959, 103, 0.942, 108, BOUNDED),
    ),
    160: (
        TileTiming(tile(3, 64, 2), 1.0, 94, 1.0, 117, BOUNDED),
        TileTiming(tile(2, 96, 2), 0.976, 210, 0.967, 186),
        TileTiming(tile(2, 64, 2), 0.937, 156, 0.938, 146, BOUNDED),
    ),
    192: (
        TileTiming(tile(2, 96, 2), 1.0, 110, 1.0, 103),
        TileTiming(tile(2, 64, 2), 0.995, 134, 0.993, 118, BOUNDED),
    ),
}
