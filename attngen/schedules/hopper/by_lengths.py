"""Which of the measured tiles is the fastest for the lengths of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attngen.plan.mask_bounds import MaskBounds
from attngen.plan.problem import Problem
from attngen.plan.tile import Tile
from attngen.schedules.hopper.tiles import TileTiming

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[Any]

SAMPLED = 12  # blocks of rows, by which the keys that all of them visit are estimated: all of 2, 3, 4, 6 or 12 blocks
PLACES = (0.0, *((i + 0.5) / SAMPLED for i in range(SAMPLED)), 1 - 2.0**-40)  # the first, those, the last


@dataclass(frozen=True, slots=True)
class Visited:
    """The keys that blocks of rows visit, in whole tiles: so many at least, on average and at most; one number for each size of
    blocks and tiles."""

    least: Numbers
    mean: Numbers
    most: Numbers


def visited(
    bounds: MaskBounds, rows: int, keys: int, block_q: Sequence[int] | Numbers = (1,), block_kv: Sequence[int] | Numbers = (1,)
) -> Visited:
    """By the closed forms of some blocks: all keys if these are the same for all rows, half of them on average if they read
    params or inputs."""
    import numpy as np

    size, tile = np.asarray(block_q)[:, None], np.asarray(block_kv)[:, None]
    if bounds.uniform:
        return Visited(*3 * (-(-keys // tile[:, 0]) * tile[:, 0],))
    first = (np.maximum(-(-rows // size), 1) * np.asarray(PLACES)).astype(np.int64) * size
    found = bounds.visited(first, np.minimum(first + size, rows) - 1, rows, keys, tile)
    if found is None:
        none = np.zeros_like(size[:, 0])
        return Visited(none, none + keys / 2, none + keys)
    return Visited(found.min(1), found[:, 1:-1].mean(1), found.max(1))


@dataclass(frozen=True)
class ByLengths:
    """The choice among tiles by the lengths of a call."""

    bounds: MaskBounds
    timings: tuple[TileTiming, ...]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(t.tile for t in self.timings)

    def fastest(self, problem: Problem) -> Tile:
        return self.timings[int(self.times(problem).argmin())].tile

    def times(self, problem: Problem) -> Numbers:
        """Of a call with each tile, in an arbitrary unit: they serve to compare tiles.

        What all blocks of rows visit takes whole rounds of the multiprocessors; what only some do fills the last round. No call
        is shorter than its longest block.
        """
        import numpy as np

        block_q, block_kv, rate, overhead, even_rate, even_overhead = self._columns
        keys = visited(self.bounds, problem.rows, problem.keys, block_q, block_kv)
        rounds = np.maximum(-(-problem.rows // block_q), 1) * (problem.heads / problem.multiprocessors)
        whole_rounds = np.ceil(rounds)
        found: Numbers
        if self.bounds.uniform:
            found = (keys.mean + even_overhead) * whole_rounds / even_rate
        else:
            of_all = keys.least * whole_rounds + (keys.mean - keys.least + overhead) * rounds
            found = np.maximum(of_all, keys.most + overhead) / rate
        return block_q * found

    @cached_property
    def _columns(self) -> tuple[Numbers, ...]:
        import numpy as np

        rows = [(t.tile.block_q, t.tile.block_kv, t.rate, t.overhead, t.even_rate, t.even_overhead) for t in self.timings]
        block_q, block_kv, *others = map(np.array, zip(*rows, strict=True))
        return block_q, block_kv, *others
