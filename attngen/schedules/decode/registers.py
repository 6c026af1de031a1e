"""The kernels of the decode schedule whose registers ptxas counts (`attngen.plan.register_table`)."""

from __future__ import annotations

from itertools import product
from typing import cast

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Copies
from attngen.plan.plan import LARGEST_HEAD, Plan
from attngen.plan.register_table import Family, Spilled, counted, spilled_kernel
from attngen.plan.room import Counted
from attngen.plan.tile import Tile
from attngen.plan.variants import SPECS, Variant, variant
from attngen.schedules.decode import shares
from attngen.schedules.parts.mma import MMA_ROWS, OPERAND_STATEMENTS, counted_head_size, operands
from attngen.schedules.parts.tile_of_block import columns

KEYS = (32, 64)  # keys of the tiles that are compiled
WARPS = STAGES = 2  # in these tiles: others take as many registers, a few more or less
# Of tiles that are always taken, as nothing else splits keys: with heads of 256, 16-bit operands spill 8 bytes at most; with
# heads above 160, split ones up to 136.
SMALLEST_KEYS = 16
FAMILIES = tuple(
    Family("decode", kind, numbers, MMA_ROWS, WARPS, STAGES, copies)
    for numbers, copies in (("16-bit", "tma"), *product(OPERAND_STATEMENTS, ("cp_async",)))
    for kind in SPECS
    if "dropout" not in kind
)


def room(facts: SpecFacts, arch: Arch, tile: Tile, copies: Copies, q_in_registers: bool) -> Counted:
    kernel, size = _as_spilled(facts, arch, tile, copies, q_in_registers), _columns(facts, tile, q_in_registers)
    if tile.block_kv <= SMALLEST_KEYS or shares.warps_have(facts.spec) == "columns":  # those have the scores of so many keys
        return Counted(LARGEST_HEAD, size)
    family = Family("decode", kernel.variant, kernel.operands, MMA_ROWS, WARPS, STAGES, copies)
    return counted(kernel, size, tile.block_kv, family)


def _as_spilled(facts: SpecFacts, arch: Arch, tile: Tile, copies: Copies, q_in_registers: bool) -> Spilled:
    numbers = operands(facts.spec).split or "16-bit"
    form = f"{copies},{have}" if (have := shares.warps_have(facts.spec)) == "columns" else copies
    return spilled_kernel(variant(facts), numbers, tile, form, _columns(facts, tile, q_in_registers), arch)


def _columns(facts: SpecFacts, tile: Tile, q_in_registers: bool) -> int:
    """What counts of a spec's head sizes: the columns of O that a thread has a share of, in as many blocks of 16 rows."""
    if shares.warps_have(facts.spec) == "columns":
        return columns(facts.spec, tile)
    return counted_head_size(facts, q_in_registers)


def as_spilled(plan: Plan) -> Spilled:
    return _as_spilled(plan.facts, plan.arch, plan.tile, plan.own.copies, bool(plan.own.q_in_registers))


def specs_of(family: Family) -> tuple[str, ...]:
    return tuple(f"{OPERAND_STATEMENTS[family.operands]} {others}" for others in SPECS[cast(Variant, family.variant)])
