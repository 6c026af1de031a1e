"""The schedule between fused and hopper: the fused kernel with Hopper's instructions. TMA copies the tiles, warpgroups multiply
by wgmma, and all threads have the same role."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.decisions import score_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.register_table import Family
from attngen.plan.shared_memory import WORK_TILE, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS, WHY_SLABS, refuse, slab_tiles, slabs
from attngen.schedules.wgmma import registers
from attngen.spec.attention import S
from attngen.spec.operator import ZERO

STAGES = 2  # one is multiplied, the other is on its way
BLOCKS = 2  # per SM, at head sizes up to 64


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

WHY_TILE = "the first preferred tile whose O, S and P fit a thread's registers, and whose stages fit shared memory"
WHY_BLOCKS = f"; of {BLOCKS} blocks on an SM one computes weights while the other multiplies"
WHY_WARPS = "a warpgroup of four multiplies 64 rows; each warp has 16 of them"


def buffers(facts: SpecFacts, tile: Tile) -> tuple[SharedBuffer, ...]:
    spec = facts.spec
    t, q, kv, stages = spec.dtype.name, tile.block_q, tile.block_kv, tile.stages
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    return (
        slab_tiles("Q", t, (max(d, dv), q), "the block's query rows, in the end its output", then="O"),
        slab_tiles("K", t, (stages, d, kv), f"the keys of {stages} tiles"),
        slab_tiles("V", t, (stages, dv, kv), f"the values of {stages} tiles"),
        SharedBuffer(name="BARRIERS", element="mbarrier", shape=(1 + 2 * stages,), use="see the kernel"),
        SharedBuffer(name="WORK_TILE", element="int", shape=(len(WORK_TILE),), use="which rows and head the block computes"),
    )


def cost(facts: SpecFacts, arch: Arch, tile: Tile) -> Cost:
    return Cost(aligned(*buffers(facts, tile)), registers.room(facts, arch, tile))


def preferred_tiles(facts: SpecFacts) -> tuple[Tile, ...]:
    size = max(facts.spec.head_dim, facts.spec.head_dim_v)
    return next(tiles for limit, tiles in PREFERRED.items() if size <= limit)


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(facts), *POSSIBLE), lambda t: cost(facts, arch, t))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    refuse(facts, arch, "wgmma", facts.pair_cost)
    tile = pick_tile(facts.spec, arch, preferred_tiles(facts), POSSIBLE, lambda t: cost(facts, arch, t))
    return with_tile(schedule, facts, arch, tile)


def of_family(schedule: Schedule, family: Family, facts: SpecFacts, arch: Arch, keys: int) -> Plan:
    return with_tile(schedule, facts, arch, Tile(WARPGROUP_ROWS * family.warps // 4, keys, family.stages, family.warps))


def with_tile(schedule: Schedule, facts: SpecFacts, arch: Arch, tile: Tile) -> Plan:
    t, blocks = facts.spec.dtype.name, _blocks(facts, tile)
    decisions = (
        Decision("schedule", "wgmma", f"{t} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"),
        *score_decisions(facts),
        tile_decision(facts.spec, tile, WHY_TILE + (WHY_BLOCKS if blocks else "")),
        Decision("warps", str(tile.warps), WHY_WARPS),
        Decision("stages", str(tile.stages), "the next K and V are copied while these are used"),
        # Not in registers, as in hopper: NVRTC 13.0 gives fragments of Q that live through the loop the registers of P
        Decision("Q", "in shared memory", "wgmma reads it there, as it does K and V"),
        Decision("swizzle", "128 bytes", WHY_SLABS),
    )
    return planned(schedule, facts, arch, tile, decisions, buffers(facts, tile), blocks=blocks)


def _blocks(facts: SpecFacts, tile: Tile) -> int:
    """The blocks per SM that the launch bounds state; 0: none. Without a bound the compiler uses a few registers too many for
    two blocks. With a score, a captured tensor or another mask, two blocks would spill."""
    bounds = facts.bounds
    plain = facts.spec.score == S and not facts.spec.inputs and not bounds.per_tile and bounds.begin == ZERO
    return BLOCKS if plain and tile in PREFERRED[64] and preferred_tiles(facts) == PREFERRED[64] else 0
