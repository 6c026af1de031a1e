"""How many keys blocks of rows visit, by the closed forms of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attngen.plan.mask_bounds import MaskBounds

if TYPE_CHECKING:
    from numpy import ndarray as Numbers

SAMPLED = 12  # blocks of rows, by which the keys that all of them visit are estimated: all of 2, 3, 4, 6 or 12 blocks
PLACES = (0.0, *((i + 0.5) / SAMPLED for i in range(SAMPLED)), 1 - 2.0**-40)  # the first, those, the last


@dataclass(frozen=True, slots=True)
class Visited:
    """The keys that blocks of rows visit, in whole tiles: one number for each size of blocks and tiles."""

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
