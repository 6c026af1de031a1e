"""How the warps of a block share the products of a tile: each has keys of its own, or columns of O of its own."""

from __future__ import annotations

from typing import Literal

from attngen.plan.own import Copies
from attngen.plan.plan import LARGEST_HEAD
from attngen.plan.tile import Tile
from attngen.schedules.parts.mma import MMA_ROWS, width_of_v
from attngen.schedules.parts.wgmma import SLAB
from attngen.spec.attention import AttentionSpec

WarpsHave = Literal["keys", "columns"]  # `templates/parts/decode/warps_have_NAME.j2`
WARPS = 4  # of a block whose warps have columns: 128 of 512, 64 registers of a thread
OWNERS: dict[WarpsHave, str] = {"keys": "a warp", "columns": "the block"}
WHY_WARPS: dict[WarpsHave, str] = {
    "keys": "each has its own keys, stages and sums: no warp waits for another before the end",
    "columns": "each has its own columns of O, as all of them would take more registers than a thread has; weights are handed on in "
    "shared memory",
}
WHY_IN_KEYS = "V is a part of K: its columns are copied once, and read as keys and as values"


def warps_have(spec: AttentionSpec) -> WarpsHave:
    return "columns" if max(spec.head_dim, spec.head_dim_v) > LARGEST_HEAD else "keys"


def key_warps(tile: Tile) -> int:
    """Parts of a tile's keys, each of a warp."""
    return tile.block_kv // MMA_ROWS


def row_warps(tile: Tile) -> int:
    """Parts of a tile's rows, each of a warp."""
    return tile.block_q // MMA_ROWS


def width(spec: AttentionSpec, warps: int) -> int:
    """The columns of V in shared memory: where warps have columns, whole sixteens of each."""
    step = MMA_ROWS * warps
    return width_of_v(spec) if warps_have(spec) == "keys" else -(-spec.head_dim_v // step) * step


def values_in_keys(spec: AttentionSpec, copies: Copies) -> bool:
    """Whether the tile of K is read as that of V too: V is columns of K that begin where a slab, or 16 bytes, do, and nothing is
    added to them. Rotated keys are other numbers than values."""
    if spec.values is None or warps_have(spec) == "keys" or spec.rotary is not None:
        return False
    begins = SLAB if copies == "tma" else MMA_ROWS
    return spec.values[0] % begins == 0 and width(spec, WARPS) == spec.head_dim_v
