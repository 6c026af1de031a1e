"""How the warps of a block share the products of a tile: each has keys of its own, or columns of O of its own."""

from __future__ import annotations

from attngen.plan.own import Copies
from attngen.plan.prepared import scales_keys
from attngen.plan.tile import Tile
from attngen.schedules.parts import mma
from attngen.schedules.parts.mma import MMA_ROWS, WarpsHave, operands
from attngen.schedules.parts.tile_of_block import WHY_COLUMNS, is_shared, width
from attngen.schedules.parts.wgmma import SLAB
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP16

# Rows of a block whose warps have columns, and its warps: of 512 columns, a thread has 64 registers of sums, or 128. Groups of
# so many query heads have more rows, which read keys less often
BLOCKS = {64: 8, 32: 4, 16: 4}
BLOCKS_OF_BYTES = BLOCKS | {32: 8}  # beside 128 registers of sums, queries and keys that become fp16 would be spilled
OWNERS: dict[WarpsHave, str] = {"keys": "a warp", "columns": "the block"}
WHY_WARPS: dict[WarpsHave, str] = {
    "keys": "each has its own keys, stages and sums: no warp waits for another before the end",
    "columns": WHY_COLUMNS,
}
WHY_IN_KEYS = "V is a part of K: its columns are copied once, and read as keys and as values"


def in_units(spec: AttentionSpec) -> bool:
    """Whether sums of O are in units of their row: products of weights and scales of V are operands of fp16."""
    return scales_keys(spec) and mma.product_dtype(spec) is FP16


def warps_have(spec: AttentionSpec) -> WarpsHave:
    return "columns" if is_shared(spec) else "keys"


def blocks(spec: AttentionSpec, copies: Copies) -> dict[int, int]:
    """The warps of blocks whose warps have columns, by their rows, the most first. TMA copies whole slabs, of which each warp
    has some; split operands need the registers that more rows would take."""
    in_slabs = spec.head_dim_v // SLAB if copies == "tma" else 0
    return {
        rows: warps
        for rows, warps in (BLOCKS_OF_BYTES if mma.is_quantized(spec) else BLOCKS).items()
        if in_slabs % warps == 0 and (rows == MMA_ROWS or not operands(spec).split)
    }


def values_in_keys(spec: AttentionSpec, copies: Copies, tile: Tile) -> bool:
    """Whether the tile of K is read as that of V too: V begins where a slab or a chunk of K does, and no zeros are added to it.
    Rotated keys are other numbers than values."""
    if spec.values is None or warps_have(spec) == "keys" or spec.rotary is not None:
        return False
    begins = SLAB if copies == "tma" else MMA_ROWS
    return spec.values[0] % begins == 0 and width(spec, tile) == spec.head_dim_v
