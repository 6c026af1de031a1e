"""The fused rung without tensor cores: online softmax, tiles in shared memory as fp32, any storage type, any architecture."""

from __future__ import annotations

from attngen.plan import fused_mma
from attngen.plan.arch import Arch
from attngen.plan.one_score import one_score_decisions
from attngen.plan.plan import Decision, Plan, lay_out
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, fitting, kib, pick_tile
from attngen.spec.attention import AttentionSpec

WARPS = 4
ROW_THREADS, COLUMN_THREADS = 16, 8  # the block's 128 threads as a grid over the tile
PAD = 4  # floats at the end of each row in shared memory: rows then start 4 banks apart, and stay 16-byte aligned

PREFERRED = tuple(Tile(q, kv, 1, WARPS) for q, kv in ((64, 64), (64, 32), (32, 32), (32, 16), (16, 16), (16, 8)))
POSSIBLE = tuple(Tile(q, kv, 1, WARPS) for q in (128, 64, 32, 16) for kv in (128, 64, 32, 16, 8))


def shared_bytes(spec: AttentionSpec, tile: Tile) -> dict[str, int]:
    return {
        "Q": 4 * tile.block_q * (spec.head_dim + PAD),
        "K": 4 * tile.block_kv * (spec.head_dim + PAD),
        "V": 4 * tile.block_kv * (spec.head_dim_v + PAD),
        "P": 4 * tile.block_q * (tile.block_kv + PAD),
    }


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    rows = tile.block_q // ROW_THREADS
    scores = rows * tile.block_kv // COLUMN_THREADS
    # the scores twice: a block of terms is summed by itself
    output = rows * spec.head_dim_v // COLUMN_THREADS
    operands = 4 * (rows + tile.block_kv // COLUMN_THREADS)
    return Cost(sum(shared_bytes(spec, tile).values()), 2 * scores + output + operands + 4 * rows + 56)


def tiles(spec: AttentionSpec, arch: Arch) -> tuple[Tile, ...]:
    """The tiles that fit."""
    return fitting(arch, (*PREFERRED, *POSSIBLE), lambda t: cost(spec, t))


def slice_of(spec: AttentionSpec) -> int:
    """Terms of Q K^T that are summed by themselves."""
    return 16 if spec.head_dim % 16 == 0 else 8


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The largest tile that fits: a thread reuses each operand from shared memory for `rows` or `columns` products."""
    tile = pick_tile(spec, arch, PREFERRED, POSSIBLE, lambda t: cost(spec, t))
    sizes = shared_bytes(spec, tile)
    q, kv, d, dv = tile.block_q, tile.block_kv, spec.head_dim, spec.head_dim_v
    buffers = lay_out(
        ("Q", sizes["Q"], f"fp32 [{q}][{d} + {PAD}], the block's query rows, for its whole life"),
        ("K", sizes["K"], f"fp32 [{kv}][{d} + {PAD}], the tile's keys"),
        ("V", sizes["V"], f"fp32 [{kv}][{dv} + {PAD}], the tile's values"),
        ("P", sizes["P"], f"fp32 [{q}][{kv} + {PAD}], the tile's weights, each row used by the warp that wrote it"),
    )
    decisions = (
        Decision("schedule", "fused_simt", f"{fused_mma.why_not(spec, arch)}: products on the ordinary arithmetic units"),
        *one_score_decisions(spec),
        Decision(
            "BLOCK_Q x BLOCK_KV",
            f"{q} x {kv}",
            "stated in the spec"
            if spec.schedule.block_q
            else f"the largest preferred tile that fits {kib(arch.shared_per_block)} of shared memory and the registers",
        ),
        Decision("THREADS", str(32 * WARPS), f"{ROW_THREADS} x {COLUMN_THREADS} threads over the tile"),
        Decision("stages", "1", "other blocks on the same multiprocessor compute while this one loads"),
    )
    return Plan("fused", "fused_simt", arch, q, kv, WARPS, 1, tile_bounds(spec), decisions, buffers)
