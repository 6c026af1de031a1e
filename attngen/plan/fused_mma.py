"""The fused rung on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async, fp16 and bf16."""

from __future__ import annotations

from attngen.plan.arch import Arch, Feature
from attngen.plan.plan import Decision, Plan, lay_out
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, kib, pick_tile
from attngen.spec.attention import AttentionSpec

ROWS_PER_WARP = 16  # the rows of one mma
PAD = 8  # elements at the end of each row in shared memory: the 8 rows of an ldmatrix then lie in different banks
NEEDED = (Feature.CP_ASYNC, Feature.LDMATRIX)
MMA = {"fp16": Feature.MMA_FP16, "bf16": Feature.MMA_BF16}
OTHER_REGISTERS = 56  # addresses, row state, fragments of K or V


def _tile(block_q: int, block_kv: int, stages: int) -> Tile:
    return Tile(block_q, block_kv, stages, block_q // ROWS_PER_WARP)


PREFERRED = tuple(
    _tile(*t) for t in ((128, 64, 2), (64, 64, 2), (64, 32, 2), (64, 64, 1), (64, 32, 1), (32, 32, 2), (32, 32, 1), (16, 16, 1))
)
POSSIBLE = tuple(_tile(q, kv, stages) for q in (128, 64, 32, 16) for kv in (128, 64, 32, 16) for stages in (2, 1))


def suits(spec: AttentionSpec, arch: Arch) -> bool:
    return spec.dtype.name in MMA and arch.has(*NEEDED, MMA[spec.dtype.name])


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size rounded up to the 16 elements that one mma sums over; the rest is zeros in shared memory."""
    return -(-spec.head_dim // 16) * 16


def holds_q(spec: AttentionSpec) -> bool:
    """Whether Q's fragments stay in registers: they take head_dim / 4 of them."""
    return spec.head_dim <= 128


def shared_bytes(spec: AttentionSpec, tile: Tile) -> dict[str, int]:
    d, dv = padded_head_dim(spec) + PAD, spec.head_dim_v + PAD
    return {
        "Q": 2 * tile.block_q * d,
        "K": 2 * tile.stages * tile.block_kv * d,
        "V": 2 * tile.stages * tile.block_kv * dv,
    }


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    output, scores, weights = spec.head_dim_v // 2, tile.block_kv // 2, tile.block_kv // 4
    q = padded_head_dim(spec) // 4 if holds_q(spec) else 0
    return Cost(sum(shared_bytes(spec, tile).values()), output + scores + weights + q + OTHER_REGISTERS)


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The preferred tile that fits; see the decisions for its reasons."""
    tile = pick_tile(spec, arch, PREFERRED, POSSIBLE, lambda t: cost(spec, t))
    sizes = shared_bytes(spec, tile)
    q, kv, stages = tile.block_q, tile.block_kv, tile.stages
    d, dv, t = padded_head_dim(spec), spec.head_dim_v, spec.dtype.name
    buffers = lay_out(
        ("Q", sizes["Q"], f"{t} [{q}][{d} + {PAD}], the block's query rows"),
        ("K", sizes["K"], f"{t} [{stages}][{kv}][{d} + {PAD}], the keys of {_tiles(stages)}"),
        ("V", sizes["V"], f"{t} [{stages}][{kv}][{dv} + {PAD}], the values of {_tiles(stages)}"),
    )
    two = Tile(q, kv, 2, tile.warps)
    why_stages = (
        "the next tile is copied while this one is computed"
        if stages == 2
        else f"a second K/V stage would need {kib(cost(spec, two).shared)} of the {kib(arch.shared_per_block)}"
    )
    if spec.schedule.stages:
        why_stages = "as the spec asks"
    why_tile = (
        "as the spec asks"
        if spec.schedule.block_q
        else f"{ROWS_PER_WARP} rows a warp; the largest preferred tile that fits registers and shared memory"
    )
    holds = holds_q(spec)
    decisions = (
        Decision("schedule", "fused_mma", f"{spec.dtype.name} on tensor cores (mma.sync, which {arch.name} has)"),
        Decision("BLOCK_Q x BLOCK_KV", f"{q} x {kv}", why_tile),
        Decision("warps", str(tile.warps), f"one for each {ROWS_PER_WARP} rows: no warp needs another's softmax"),
        Decision("stages", str(stages), why_stages),
        Decision(
            "Q",
            "in registers" if holds else "in shared memory",
            f"its fragments take {d // 4} registers a thread"
            + ("" if holds else ", and the output already takes " + str(dv // 2)),
        ),
        Decision("rows in shared memory", f"padded by {PAD}", "the 8 rows that ldmatrix reads lie in different banks"),
    )
    return Plan("fused", "fused_mma", arch, q, kv, tile.warps, stages, tile_bounds(spec), decisions, buffers, holds)


def _tiles(stages: int) -> str:
    return "one tile" if stages == 1 else f"{stages} tiles"
