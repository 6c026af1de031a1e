"""The plan of the tiled schedule: the naive kernels with tiles in shared memory and registers; empty tiles are skipped."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.decisions import score_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.spec.attention import AttentionSpec

BLOCK_DV = 64  # dimensions of O that a block computes
ROWS_PER_PAD = 4  # rows of a transposed tile between two paddings: the terms that a thread fetches at once

PREFERRED = (Tile(64, 64, 1, 4),)
WHY_TILE = "a multiprocessor has registers for several blocks: some multiply while others load or store"
WHY_PAD = f"floats after every {ROWS_PER_PAD} rows of a transposed tile: as many as a warp writes at once"
POSSIBLE = (*PREFERRED, Tile(64, 64, 1, 2), Tile(128, 64, 1, 4), Tile(128, 64, 1, 8), Tile(128, 128, 1, 8))


@dataclass(frozen=True, slots=True)
class TiledPlan(Own):
    row_threads: int  # a block's threads are a grid of row_threads x column_threads over a tile
    column_threads: int
    rows: int  # rows of a tile, or of a result, that a thread computes
    columns: int  # keys of a tile that a thread computes
    slice: int  # terms of each sum that are in shared memory at once
    pad: int  # floats after every ROWS_PER_PAD rows of a transposed tile


def thread_grid(warps: int) -> tuple[int, int]:
    """The grid of threads over a tile, (rows, columns): each warp is 4 x 8 threads of it."""
    rows = min(16, 4 * warps)
    return rows, 32 * warps // rows


def slice_of(spec: AttentionSpec) -> int:
    """The number of terms of each sum that are in shared memory at once: a divisor of the head size and of every tile."""
    return 16 if spec.head_dim % 16 == 0 else 8


def pad_of(spec: AttentionSpec) -> int:
    """The padding, in floats, after every ROWS_PER_PAD rows of a transposed tile: as many as a warp writes to a row at once."""
    return 32 * ROWS_PER_PAD // slice_of(spec)


def outputs(tile: Tile) -> tuple[int, int, int]:
    """The numbers of rows, of keys of S and of dimensions of O that a thread computes."""
    rows, columns = thread_grid(tile.warps)
    return tile.block_q // rows, tile.block_kv // columns, BLOCK_DV // columns


def fetched_ahead(spec: AttentionSpec, tile: Tile) -> int:
    """The number of prefetched elements that a thread holds while it multiplies."""
    return slice_of(spec) * (tile.block_q + max(tile.block_kv, BLOCK_DV)) // (32 * tile.warps)


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    """The cost of a tile: that of the larger product. All tiles have registers enough, whatever the head size."""
    spec = facts.spec
    padding = 2 * slice_of(spec) // ROWS_PER_PAD * pad_of(spec)
    return Cost(4 * (slice_of(spec) * (tile.block_q + max(tile.block_kv, BLOCK_DV)) + padding))


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, POSSIBLE, lambda t: cost(facts, t))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec = facts.spec
    tile = pick_tile(spec, arch, PREFERRED, POSSIBLE, lambda t: cost(facts, t))
    rows, columns, dims = outputs(tile)
    own = TiledPlan(*thread_grid(tile.warps), rows, columns, slice_of(spec), pad_of(spec))
    whole = "a softmax needs whole rows" if spec.normalize == "softmax" else "each kernel reads what the one before wrote"
    decisions = (
        Decision("scores", "in global memory", f"{whole}; the fused schedule avoids this"),
        *score_decisions(facts),
        tile_decision(spec, tile, WHY_TILE),
        Decision(
            "THREADS",
            str(32 * tile.warps),
            f"{own.row_threads} x {own.column_threads} threads, each with {rows} x {columns} scores, and {rows} x {dims} "
            f"outputs, in registers: {rows + columns} floats from shared memory make {rows * columns} products",
        ),
        Decision("SLICE", str(own.slice), f"a thread holds {fetched_ahead(spec, tile)} numbers of the next slices"),
        Decision("PAD", str(own.pad), WHY_PAD),
    )
    return planned(schedule, facts, arch, tile, decisions, own=own, workspaces=("S",))
