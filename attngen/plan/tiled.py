"""The tiled rung: the naive kernels with tiles in shared memory and in registers; tiles that the mask leaves empty are left out."""

from __future__ import annotations

from dataclasses import replace

from attngen.plan.arch import Arch
from attngen.plan.plan import Decision, Plan
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, kib, pick_tile
from attngen.spec.attention import AttentionSpec, Schedule

ROW_THREADS = 16  # the block's threads as a grid over the tile, 2 * warps columns of them
BLOCK_DV = 64  # dimensions of O of a block
SLICE = 8  # terms of the sums in shared memory at a time; every head size and every tile is a multiple of it
PAD = 4  # floats at the end of each row of a transposed tile
BLOCKS = 2  # of an SM, at least: one multiplies while the other loads or stores
RESERVED = 1024  # bytes of shared memory that the driver adds to each block

PREFERRED = (Tile(128, 64, 1, 4), Tile(64, 64, 1, 4))
POSSIBLE = (*PREFERRED, Tile(64, 128, 1, 4), Tile(128, 128, 1, 8), Tile(128, 64, 1, 8))


def column_threads(tile: Tile) -> int:
    return 32 * tile.warps // ROW_THREADS


def outputs(tile: Tile) -> tuple[int, int, int]:
    """The rows, keys of S and dimensions of O of a thread."""
    return tile.block_q // ROW_THREADS, tile.block_kv // column_threads(tile), BLOCK_DV // column_threads(tile)


def cost(tile: Tile) -> Cost:
    """The larger of the two products' costs; shared memory is that of the weighted sum, which keeps O there."""
    rows, columns, dims = outputs(tile)
    operands = rows + max(columns, dims)
    fetched = SLICE * (tile.block_q + max(tile.block_kv, BLOCK_DV)) // (32 * tile.warps)
    scores = 4 * SLICE * (tile.block_q + tile.block_kv + 2 * PAD)
    weighted_sum = 4 * SLICE * (tile.block_q + PAD + BLOCK_DV) + 4 * tile.block_q * BLOCK_DV
    return Cost(max(scores, weighted_sum), rows * max(columns, dims) + 2 * operands + fetched + 30)


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The largest preferred tile of which an SM holds two blocks, unless the spec's own `kernel tiled` asks for another."""
    asked = spec if spec.schedule.rung == "tiled" else replace(spec, schedule=Schedule())
    preferred = tuple(t for t in PREFERRED if BLOCKS * (cost(t).shared + RESERVED) <= arch.shared_per_sm)
    tile = pick_tile(asked, arch, preferred, POSSIBLE, cost)
    rows, columns, dims = outputs(tile)
    shape = f"{rows} x {columns} scores and {rows} x {dims} outputs"
    decisions = (
        Decision("scores", "in global memory", "the softmax needs whole rows; the fused rung removes this"),
        Decision(
            "BLOCK_Q x BLOCK_KV",
            f"{tile.block_q} x {tile.block_kv}",
            "as the spec asks"
            if asked.schedule.block_q
            else f"the largest of which {BLOCKS} blocks fit the {kib(arch.shared_per_sm)} of shared memory of a multiprocessor",
        ),
        Decision(
            "THREADS",
            str(32 * tile.warps),
            f"{ROW_THREADS} x {column_threads(tile)} threads, each with {shape} in registers: {rows + columns} floats read from "
            f"shared memory make {rows * columns} products",
        ),
        Decision("SLICE", str(SLICE), "what a thread fetches ahead takes registers; every head size is a multiple of 8"),
        Decision("O", "in shared memory from tile to tile", "its registers hold the sums of one tile, which are added to it"),
    )
    return Plan("tiled", "tiled", arch, tile.block_q, tile.block_kv, tile.warps, 1, tile_bounds(spec), decisions)
