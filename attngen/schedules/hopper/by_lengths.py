"""Which of the measured tiles is the fastest for the lengths of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from attngen.plan.mask_bounds import MaskBounds
from attngen.plan.problem import Problem
from attngen.plan.tile import Tile
from attngen.plan.visited_keys import visited
from attngen.schedules.hopper.tiles import TileTiming

if TYPE_CHECKING:
    from numpy import ndarray as Numbers


@dataclass(frozen=True)
class ByLengths:
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
        found = block_q * found
        return found

    @cached_property
    def _columns(self) -> tuple[Numbers, ...]:
        import numpy as np

        rows = [(t.tile.block_q, t.tile.block_kv, t.rate, t.overhead, t.even_rate, t.even_overhead) for t in self.timings]
        block_q, block_kv, *others = map(np.array, zip(*rows, strict=True))
        return block_q, block_kv, *others
