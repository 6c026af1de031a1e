"""The tiles of the Hopper kernel: which are preferred, and which of them suits the lengths of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from attngen.plan.problem import Problem
from attngen.plan.tile import Tile

WARPGROUP_ROWS = 64  # of a wgmma


def tile(consumers: int, block_kv: int, stages: int) -> Tile:
    return Tile(WARPGROUP_ROWS * consumers, block_kv, stages, 4 * (consumers + 1))


def consumers(tile: Tile) -> int:
    """Warpgroups that multiply."""
    return tile.warps // 4 - 1


# By the larger head size; the first that fits is taken where the lengths of a call are not known.
PREFERRED: dict[int, tuple[Tile, ...]] = {
    64: (tile(2, 128, 3), tile(2, 96, 3)),
    80: (tile(3, 80, 3), tile(2, 128, 2), tile(2, 96, 2)),
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


# A softmax of scores as they are, under no mask or one that bounds keys from above; under one that allows each row a range of
# keys; a softmax of scores that are changed without a bound; any other attention.
MaskClass = Literal["plain", "window", "scored", "other"]
MASK_CLASSES: tuple[MaskClass, ...] = get_args(MaskClass)
PLAIN: tuple[MaskClass, ...] = ("plain",)
WINDOWS_TOO: tuple[MaskClass, ...] = ("plain", "window")
SCORED: tuple[MaskClass, ...] = ("scored",)


@dataclass(frozen=True, slots=True)
class Visited:
    """How many keys the rows of a call visit: all of them as many (`even`), or so many at least and on average."""

    even: bool
    least: float
    mean: float


@dataclass(frozen=True, slots=True)
class TileTiming:
    """How fast a tile is, beside the others of its head size: by the keys that a block of rows visits, and its cost on top.

    Measured at S = 512 to 16384 (`benchmarks/hopper.py --only lengths`) on an H200; 192 x 128, and D96 without a mask, on an
    H100.
    """

    tile: Tile
    rate: float  # of the steady loop: pairs a time
    overhead: int  # of a block of rows, as if it visited so many keys more
    even_rate: float  # the same where all rows have the same keys
    even_overhead: int
    serves: tuple[MaskClass, ...] = MASK_CLASSES  # those for which no other tile was measured to be faster

    def time(self, problem: Problem, visited: Visited, rows: int) -> float:
        """Of a call, to compare it with that of other tiles; `rows` are those that visit the same keys.

        What all blocks of rows visit takes whole rounds of the multiprocessors; what only some do fills the last round.
        """
        blocks = max(-(-problem.rows // self.tile.block_q), 1)
        rounds = blocks * problem.heads / problem.multiprocessors
        whole_rounds = -(-rounds // 1)
        if visited.even:
            return self.tile.block_q * (visited.mean + self.even_overhead) / self.even_rate * whole_rounds
        more = visited.mean - visited.least + (rows + self.tile.block_kv) / 2
        filled = -(-problem.rows // rows) * rows / (blocks * self.tile.block_q)  # a consumer without rows visits none
        keys = visited.least * whole_rounds + (filled * more + self.overhead) * max(rounds, 1.0)
        return self.tile.block_q * keys / self.rate


TIMINGS: dict[int, tuple[TileTiming, ...]] = {
    40: (
        TileTiming(tile(4, 64, 4), 1.0, 100, 1.0, 60),
        TileTiming(tile(2, 128, 3), 0.889, 71, 0.83, 0),
    ),
    56: (  # threads that add the weights of a row would spill with four consumers
        TileTiming(tile(2, 128, 3), 1.0, 100, 1.0, 0),
        TileTiming(tile(3, 128, 3), 1.108, 190, 1.108, 130, PLAIN),
    ),
    64: (
        TileTiming(tile(4, 64, 4), 1.0, 103, 1.0, 30),
        TileTiming(tile(2, 128, 3), 0.951, 87, 0.956, 32),
        TileTiming(tile(3, 128, 3), 1.026, 230, 1.048, 228, PLAIN),
        TileTiming(tile(3, 64, 3), 1.131, 198, 0.9, 60, SCORED),
    ),
    80: (
        TileTiming(tile(3, 80, 3), 1.0, 215, 1.0, 140, WINDOWS_TOO),
        TileTiming(tile(2, 128, 2), 0.838, 109, 0.747, 15),
        TileTiming(tile(3, 112, 2), 1.008, 247, 1.076, 303, PLAIN),
        TileTiming(tile(4, 48, 4), 0.949, 205, 0.94, 110, PLAIN),
    ),
    96: (
        TileTiming(tile(3, 64, 3), 1.0, 114, 1.0, 44, WINDOWS_TOO),
        TileTiming(tile(2, 128, 2), 0.923, 68, 0.91, 40),
        TileTiming(tile(3, 96, 2), 1.036, 161, 1.029, 228, PLAIN),
    ),
    128: (
        TileTiming(tile(2, 128, 2), 1.0, 179, 1.0, 0),
        TileTiming(tile(3, 80, 3), 1.016, 206, 1.075, 130, PLAIN),
        TileTiming(tile(3, 64, 3), 1.025, 195, 1.06, 130, (*WINDOWS_TOO, *SCORED)),
    ),
    160: (
        TileTiming(tile(3, 64, 2), 1.0, 150, 1.0, 60, WINDOWS_TOO),
        TileTiming(tile(2, 96, 2), 0.925, 132, 0.909, 144),
    ),
}
