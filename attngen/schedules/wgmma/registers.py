"""The kernels of the wgmma schedule whose registers ptxas counts (`attngen.plan.register_table`)."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Plan
from attngen.plan.register_table import Family, Spilled, counted, spilled_kernel
from attngen.plan.room import Counted
from attngen.plan.tile import Tile
from attngen.plan.variants import SPECS, Variant, variant
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS

ROWS: dict[str, tuple[Variant, ...]] = {
    "usual": ("plain", "closed", "closed,more", "keys", "distances"),
    "more": ("keys,more", "pairs", "dropout", "dropout,more"),
    "divided": ("divided",),
}
KEYS = (16, 32, 48, 64, 80, 96, 128)
STAGES = 2  # in all its tiles
FEW_WARPS, WARPS = 4, 12  # for one or two warpgroups, whose threads may have all registers; for three
FAMILIES = tuple(
    Family("wgmma", kind, "16-bit", WARPGROUP_ROWS, n, STAGES, "shared") for kind in ROWS for n in (FEW_WARPS, WARPS)
)


def room(facts: SpecFacts, arch: Arch, tile: Tile) -> Counted:
    """Whether registers suffice: a thread has columns of O."""
    warps = WARPS if tile.warps >= WARPS else FEW_WARPS
    row = next(name for name, kinds in ROWS.items() if variant(facts) in kinds)
    family = Family("wgmma", row, "16-bit", WARPGROUP_ROWS, warps, STAGES, "shared")
    return counted(_as_spilled(facts, arch, tile), facts.spec.head_dim_v, tile.block_kv, family)


def _as_spilled(facts: SpecFacts, arch: Arch, tile: Tile) -> Spilled:
    return spilled_kernel(variant(facts), "16-bit", tile, "shared", facts.spec.head_dim_v, arch)


def as_spilled(plan: Plan) -> Spilled:
    return _as_spilled(plan.facts, plan.arch, plan.tile)


def specs_of(family: Family) -> tuple[str, ...]:
    return tuple(f"dtype fp16 {others} kernel wgmma" for kind in ROWS[family.variant] for others in SPECS[kind])
