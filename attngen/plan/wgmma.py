"""The rung between fused and hopper: the fused kernel with Hopper's instructions. TMA brings the tiles, warpgroups multiply by
wgmma, and none has a role of its own."""

from __future__ import annotations

from attngen.plan import hopper
from attngen.plan.arch import Arch
from attngen.plan.fused_mma_needs import reads_pairs
from attngen.plan.hopper_tiles import WARPGROUP_ROWS
from attngen.plan.one_score import one_score_decisions
from attngen.plan.plan import ALIGN, Decision, Plan, lay_out
from attngen.plan.precision import precision_decisions
from attngen.plan.tiles import TileBounds, tile_bounds
from attngen.plan.tiling import Cost, Tile, fitting, pick_tile
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.operator import ZERO

STAGES = 2  # one is multiplied, the other is on its way
BLOCKS = 2  # of an SM, at head sizes up to 64
OTHER_REGISTERS = 40  # addresses, row state, the exponents on their way
CAPTURED_REGISTERS = 10  # addresses of captured tensors


def tile(warpgroups: int, block_kv: int) -> Tile:
    return Tile(WARPGROUP_ROWS * warpgroups, block_kv, STAGES, 4 * warpgroups)


# By the larger head size.
PREFERRED: dict[int, tuple[Tile, ...]] = {
    64: (tile(2, 128), tile(2, 64), tile(2, 48)),
    128: (tile(2, 128), tile(2, 96), tile(2, 80)),
    192: (tile(2, 96), tile(2, 80), tile(2, 64)),
    256: (tile(2, 64), tile(2, 48), tile(2, 32)),
}
POSSIBLE = tuple(tile(groups, kv) for groups in (2, 1, 3) for kv in (128, 96, 80, 64, 48, 32, 16))


def shared_bytes(spec: AttentionSpec, tile: Tile) -> dict[str, int]:
    d, dv = (2 * hopper.SLAB * hopper.slabs(n) for n in (spec.head_dim, spec.head_dim_v))
    return {
        "Q": tile.block_q * max(d, dv),
        "K": tile.stages * tile.block_kv * d,
        "V": tile.stages * tile.block_kv * dv,
        "BARRIERS": 8 * (1 + 2 * tile.stages),
        "PLACE": 12,
    }


def registers(spec: AttentionSpec, tile: Tile) -> int:
    """What a thread needs: output, scores, weights, and the rest."""
    scores = tile.block_kv // 2
    captured = (CAPTURED_REGISTERS if spec.inputs else 0) + (scores if reads_pairs(spec) else 0)  # an element for each score
    return spec.head_dim_v // 2 + scores + scores // 2 + captured + OTHER_REGISTERS


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    return Cost(sum(-(-n // ALIGN) * ALIGN for n in shared_bytes(spec, tile).values()), registers(spec, tile))


def preferred_tiles(spec: AttentionSpec) -> tuple[Tile, ...]:
    size = max(spec.head_dim, spec.head_dim_v)
    return next(tiles for limit, tiles in PREFERRED.items() if size <= limit)


def tiles(spec: AttentionSpec, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(spec), *POSSIBLE), lambda t: cost(spec, t))


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The preferred tile that fits; see the decisions for its reasons."""
    hopper.refuse(spec, arch, "wgmma")
    tile = pick_tile(spec, arch, preferred_tiles(spec), POSSIBLE, lambda t: cost(spec, t))
    q, kv, stages, t = tile.block_q, tile.block_kv, tile.stages, spec.dtype.name
    sizes = shared_bytes(spec, tile)
    assert all(sizes[name] % hopper.SWIZZLE_ATOM == 0 for name in "QKV"), sizes
    d, dv = hopper.slabs(spec.head_dim), hopper.slabs(spec.head_dim_v)
    bounds = tile_bounds(spec)
    blocks = _blocks(spec, bounds, tile)
    buffers = lay_out(
        ("Q", sizes["Q"], f"{t} [{max(d, dv)}][{q}][{hopper.SLAB}], the block's query rows, in the end its output"),
        ("K", sizes["K"], f"{t} [{stages}][{d}][{kv}][{hopper.SLAB}], the keys of {stages} tiles"),
        ("V", sizes["V"], f"{t} [{stages}][{dv}][{kv}][{hopper.SLAB}], the values of {stages} tiles"),
        ("BARRIERS", sizes["BARRIERS"], f"mbarrier [1 + 2 * {stages}], see the kernel"),
        ("PLACE", sizes["PLACE"], "int [3], which rows and head the block computes"),
    )
    decisions = (
        Decision("schedule", "wgmma", f"{t} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"),
        *precision_decisions(spec),
        *one_score_decisions(spec),
        Decision(
            "BLOCK_Q x BLOCK_KV",
            f"{q} x {kv}",
            _why_tile(spec, blocks),
        ),
        Decision(
            "warps", str(tile.warps), "four are a warpgroup, which multiplies 64 rows; a warp has the weights of 16 of them"
        ),
        Decision("stages", str(stages), "the next K and V are copied while these are used"),
        # Not in registers, as in hopper: NVRTC 13.0 gives fragments of Q that live through the loop the registers of P
        Decision("Q", "in shared memory", "wgmma reads it there, as it does K and V"),
        Decision("swizzle", "128 bytes", hopper.LAYOUT + ", so that neither TMA nor wgmma meets a bank conflict"),
    )
    return Plan("wgmma", "wgmma", arch, q, kv, tile.warps, stages, bounds, decisions, buffers, blocks=blocks)


def _blocks(spec: AttentionSpec, bounds: TileBounds, tile: Tile) -> int:
    """The blocks of an SM that the compiler is told of, 0 for none: untold it takes a few registers too many for two.
    What a score, a captured tensor or another mask takes would spill."""
    plain = spec.score == S and not spec.inputs and not bounds.per_tile and bounds.kv_begin == ZERO
    return BLOCKS if plain and tile in PREFERRED[64] and preferred_tiles(spec) == PREFERRED[64] else 0


def _why_tile(spec: AttentionSpec, blocks: int) -> str:
    if spec.schedule.block_q:
        return "stated in the spec"
    fits = "the first preferred tile whose O, S and P fit a thread's registers, and whose stages fit shared memory"
    return f"{fits}; of {blocks} blocks on an SM one computes weights while the other multiplies" if blocks else fits
