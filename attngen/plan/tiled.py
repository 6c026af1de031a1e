"""The tiled rung: the naive kernels with tiles in shared memory and in registers, and no tile that the mask leaves empty."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.one_score import one_score_decisions
from attngen.plan.plan import Decision, Plan
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, pick_tile
from attngen.spec.attention import AttentionSpec

BLOCK_DV = 64  # dimensions of O of a block
ROWS_PER_PAD = 4  # of a transposed tile: the terms that a thread fetches at once
OTHER_REGISTERS = 30  # addresses, sizes, loops

PREFERRED = (Tile(64, 64, 1, 4),)
POSSIBLE = (*PREFERRED, Tile(64, 64, 1, 2), Tile(128, 64, 1, 4), Tile(128, 64, 1, 8), Tile(128, 128, 1, 8))


def thread_grid(warps: int) -> tuple[int, int]:
    """The rows and columns of threads over a tile: each warp has 4 x 8 of it."""
    rows = min(16, 4 * warps)
    return rows, 32 * warps // rows


def slice_of(spec: AttentionSpec) -> int:
    """Terms of the sums in shared memory at a time; every head size and every tile is a multiple of it."""
    return 16 if spec.head_dim % 16 == 0 else 8


def pad_of(spec: AttentionSpec) -> int:
    """Floats left free after every ROWS_PER_PAD rows of a transposed tile: as many as a warp writes of one row at once."""
    return 32 * ROWS_PER_PAD // slice_of(spec)


def outputs(tile: Tile) -> tuple[int, int, int]:
    """The rows, keys of S and dimensions of O of a thread."""
    rows, columns = thread_grid(tile.warps)
    return tile.block_q // rows, tile.block_kv // columns, BLOCK_DV // columns


def fetched_ahead(spec: AttentionSpec, tile: Tile) -> int:
    """Floats of the next slices that a thread holds while it multiplies; 16-bit numbers take less."""
    return slice_of(spec) * (tile.block_q + max(tile.block_kv, BLOCK_DV)) // (32 * tile.warps)


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    """The larger of the two products' costs. A thread has every sum twice: that of a slice or a tile is made by itself."""
    rows, columns, dims = outputs(tile)
    columns, width = max(columns, dims), max(tile.block_kv, BLOCK_DV)
    padding = 2 * slice_of(spec) // ROWS_PER_PAD * pad_of(spec)
    shared = 4 * (slice_of(spec) * (tile.block_q + width) + padding)
    return Cost(shared, 2 * rows * columns + 2 * (rows + columns) + fetched_ahead(spec, tile) + OTHER_REGISTERS)


def _why_scores(spec: AttentionSpec) -> str:
    return "a softmax needs whole rows" if spec.normalize == "softmax" else "each kernel reads what the one before wrote"


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """64 x 64 tiles, unless the spec asks for others."""
    tile = pick_tile(spec, arch, PREFERRED, POSSIBLE, lambda t: cost(spec, t))
    rows, columns, dims = outputs(tile)
    grid = "{} x {}".format(*thread_grid(tile.warps))
    decisions = (
        Decision("scores", "in global memory", f"{_why_scores(spec)}; the fused schedule avoids this"),
        *one_score_decisions(spec),
        Decision(
            "BLOCK_Q x BLOCK_KV",
            f"{tile.block_q} x {tile.block_kv}",
            "stated in the spec"
            if spec.schedule.block_q
            else "a multiprocessor has registers for several blocks: some multiply while others load or store",
        ),
        Decision(
            "THREADS",
            str(32 * tile.warps),
            f"{grid} threads, each with {rows} x {columns} scores, and {rows} x {dims} outputs, in registers: {rows + columns} "
            f"floats from shared memory make {rows * columns} products",
        ),
        Decision("SLICE", str(slice_of(spec)), f"a thread holds {fetched_ahead(spec, tile)} numbers of the next slices"),
    )
    return Plan("tiled", "tiled", arch, tile.block_q, tile.block_kv, tile.warps, 1, tile_bounds(spec), decisions)
