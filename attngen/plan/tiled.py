"""The tiled rung: the naive kernels with tiles in shared memory and in registers; tiles that the mask leaves empty are left out."""

from __future__ import annotations

from dataclasses import replace

from attngen.plan.arch import Arch
from attngen.plan.plan import Decision, Plan
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, pick_tile
from attngen.spec.attention import AttentionSpec, Schedule

BLOCK_DV = 64  # dimensions of O of a block
PAD = 4  # floats at the end of each row of a transposed tile

PREFERRED = (Tile(128, 64, 1, 4),)
POSSIBLE = (*PREFERRED, Tile(64, 64, 1, 2), Tile(64, 64, 1, 4), Tile(128, 64, 1, 8), Tile(128, 128, 1, 8))


def thread_grid(warps: int) -> tuple[int, int]:
    """The rows and columns of threads over a tile: each warp has 4 x 8 of it."""
    rows = min(16, 4 * warps)
    return rows, 32 * warps // rows


def slice_of(spec: AttentionSpec) -> int:
    """Terms of the sums in shared memory at a time; every head size and every tile is a multiple of it."""
    return 16 if spec.head_dim % 16 == 0 else 8


def outputs(tile: Tile) -> tuple[int, int, int]:
    """The rows, keys of S and dimensions of O of a thread."""
    rows, columns = thread_grid(tile.warps)
    return tile.block_q // rows, tile.block_kv // columns, BLOCK_DV // columns


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    """The larger of the two products' costs. A thread has every sum twice: that of a slice or a tile is made by itself."""
    rows, columns, dims = outputs(tile)
    columns, width = max(columns, dims), max(tile.block_kv, BLOCK_DV)
    terms = slice_of(spec)
    fetched = terms * (tile.block_q + width) // (32 * tile.warps)
    return Cost(4 * terms * (tile.block_q + width + 2 * PAD), 2 * rows * columns + 2 * (rows + columns) + fetched + 30)


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """128 x 64 tiles, unless the spec's own `kernel tiled` asks for others."""
    asked = spec if spec.schedule.rung == "tiled" else replace(spec, schedule=Schedule())
    tile = pick_tile(asked, arch, PREFERRED, POSSIBLE, lambda t: cost(spec, t))
    rows, columns, dims = outputs(tile)
    grid = "{} x {}".format(*thread_grid(tile.warps))
    terms = slice_of(spec)
    decisions = (
        Decision("scores", "in global memory", "the softmax needs whole rows; the fused rung removes this"),
        Decision(
            "BLOCK_Q x BLOCK_KV",
            f"{tile.block_q} x {tile.block_kv}",
            "as the spec asks"
            if asked.schedule.block_q
            else "small blocks, so that an SM has several: one multiplies while another loads or stores",
        ),
        Decision(
            "THREADS",
            str(32 * tile.warps),
            f"{grid} threads, each with {rows} x {columns} scores, and {rows} x {dims} outputs, in registers: {rows + columns} "
            f"floats from shared memory make {rows * columns} products",
        ),
        Decision("SLICE", str(terms), f"what is fetched ahead takes {-(-terms * (tile.block_q + BLOCK_DV) // (32 * tile.warps))} registers a thread"),
    )
    return Plan("tiled", "tiled", arch, tile.block_q, tile.block_kv, tile.warps, 1, tile_bounds(spec), decisions)
