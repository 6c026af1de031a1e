"""Calls of many short rows, such as those of windows of an image: `auto` takes `fused` for them, with tiles of their size.

A tile of 128 rows is half empty there, and the persistent kernels compute one work tile after the other, where an SM has room
for several small blocks. Measured by `attngen tune` on an H200: docs/experiments.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.facts import SpecFacts
from attngen.plan.problem import Problem
from attngen.plan.tile import Tile


@dataclass(frozen=True, slots=True)
class ShortRows:
    """The tiles for calls of at most so many rows, and as many keys; None: those of the schedule."""

    most: int
    forward: Tile | None
    backward: Tile | None  # rows that a block of keys visits x its keys


BY_HEAD_SIZE = {  # the larger one, at most
    32: (ShortRows(64, Tile(64, 64, 2, 2), Tile(64, 64, 2, 2)), ShortRows(128, None, None)),
    64: (ShortRows(64, Tile(64, 64, 2, 4), Tile(32, 64, 2, 2)),),
    128: (ShortRows(64, Tile(64, 32, 1, 4), Tile(32, 64, 2, 4)),),
}
BECAUSE = "their tiles are small, and an SM computes several of them side by side"


def short_rows(facts: SpecFacts) -> tuple[ShortRows, ...]:
    """What is measured for the spec, the shortest rows first: 16-bit numbers, every sequence in a place of its own."""
    spec = facts.spec
    if spec.dtype.bytes > 2 or spec.kernel.storage not in ("dense", "packed"):
        return ()
    return next((found for size, found in BY_HEAD_SIZE.items() if max(spec.head_dim, spec.head_dim_v) <= size), ())


def of_problem(found: tuple[ShortRows, ...], problem: Problem) -> ShortRows | None:
    """What is for the sizes of a call, which must have a head for each SM at least, those of the whole batch counted."""
    if problem.heads < problem.multiprocessors:
        return None
    return next((short for short in found if max(problem.rows, problem.keys) <= short.most), None)
