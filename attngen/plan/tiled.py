"""The tiled rung: the naive kernels with tiles in shared memory and registers; tiles that the mask leaves empty are left out."""

from __future__ import annotations

from dataclasses import replace

from attngen.plan.arch import Arch
from attngen.plan.plan import Decision, Plan
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, pick_tile
from attngen.spec.attention import AttentionSpec, Schedule

ROW_THREADS = 16  # the block's threads as a grid over the tile: so many rows of them, 2 * warps columns
BLOCK_DV = 64  # dimensions of O of a block
VECTOR = 4  # floats that a thread reads from shared memory at once
PAD = 4  # floats at the end of each row in shared memory: eight rows in a row then start in different banks
SLICE_KV = 16  # keys in shared memory at a time, in the weighted sum
STATIC_SHARED = 48 * 1024  # bytes that a block may have without asking for more

PREFERRED = (Tile(128, 64, 1, 4),)
POSSIBLE = tuple(Tile(q, kv, 1, warps) for warps in (8, 4) for q in (128, 64) for kv in (128, 64))
WARPS_OF_SM = 16  # at 128 registers a thread: enough that some multiply while others load


def slice_d(spec: AttentionSpec) -> int:
    """Dimensions in shared memory at a time, in the scores; every head size is a multiple of it."""
    return 8


def column_threads(warps: int) -> int:
    return 32 * warps // ROW_THREADS


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    """The larger of the two products' costs."""
    rows, threads = tile.block_q // ROW_THREADS, 32 * tile.warps
    columns, dims = tile.block_kv // column_threads(tile.warps), BLOCK_DV // column_threads(tile.warps)
    d = slice_d(spec)
    scores = rows * columns + 4 * min(rows, columns) + (tile.block_q + tile.block_kv) * d // threads
    output = 2 * rows * dims + 4 * min(rows, dims) + (tile.block_q + BLOCK_DV) * SLICE_KV // threads
    scores_smem = 4 * (tile.block_q + tile.block_kv) * (d + PAD)
    output_smem = 4 * (tile.block_q * (SLICE_KV + PAD) + SLICE_KV * BLOCK_DV)
    return Cost(max(scores_smem, output_smem), max(scores, output) + 24)


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """128 x 128 scores a block, 8 x 8 a thread, unless the spec's own `kernel tiled` asks for another tile."""
    asked = spec if spec.schedule.rung == "tiled" else replace(spec, schedule=Schedule())
    tile = pick_tile(asked, arch, PREFERRED, POSSIBLE, lambda t: cost(spec, t))
    columns, dims = tile.block_kv // column_threads(tile.warps), BLOCK_DV // column_threads(tile.warps)
    rows = tile.block_q // ROW_THREADS
    blocks = WARPS_OF_SM // tile.warps
    decisions = (
        Decision("BLOCK_Q x BLOCK_KV", f"{tile.block_q} x {tile.block_kv}", "x"),
        Decision("THREADS", str(32 * tile.warps), f"{rows} x {columns} {dims}"),
        Decision("scores", "in global memory", "the softmax needs whole rows; the fused rung removes this"),
    )
    return Plan("tiled", "tiled", arch, tile.block_q, tile.block_kv, tile.warps, 1, tile_bounds(spec), decisions, blocks=blocks)
