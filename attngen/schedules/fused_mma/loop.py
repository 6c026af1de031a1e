"""Choices of the tile loop of the fused schedule on tensor cores, by measurement: when copies start, and who copies.

The measurements are rows of docs/experiments.md.
"""

from __future__ import annotations

from attngen.plan.tile import Tile
from attngen.schedules.fused_mma import needs
from attngen.spec.attention import AttentionSpec

BETWEEN_UP_TO = 128  # head size: by measurement, wider ones are not faster with copies between products


def copies_between_steps(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether copies are issued between the steps of products instead of before them: if there are enough steps, a warp has two
    row blocks, and it is not slower."""
    steps, last = needs.padded_head_dim(spec) // needs.MMA_ROWS, tile.block_kv // needs.MMA_ROWS
    narrow = max(spec.head_dim, spec.head_dim_v) <= BETWEEN_UP_TO
    return steps >= 3 and last >= 2 and needs.row_blocks(tile) == 2 and narrow and not needs.operands(spec).split


def idle_copiers(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether some threads copy nothing: the chunks of a row of 16-bit numbers do not divide the number of threads."""
    widths = (needs.padded_head_dim(spec), needs.width_of_v(spec))
    return not needs.operands(spec).split and any(32 * tile.warps % (width // needs.chunk(spec)) for width in widths)
