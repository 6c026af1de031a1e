"""The kernels of the fused schedule on tensor cores whose registers ptxas counts (`attngen.plan.register_table`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal, cast

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import LARGEST_HEAD, Plan
from attngen.plan.register_table import Family, Spilled, counted, spilled_kernel
from attngen.plan.room import Counted
from attngen.plan.tile import Tile
from attngen.plan.variants import DOCUMENTS, SPECS, without_dropout
from attngen.schedules.fused_mma.needs import RANDOM_REGISTERS, row_blocks, staged_of
from attngen.schedules.parts.mma import OPERAND_STATEMENTS, counted_head_size, operands
from attngen.schedules.parts.tile_of_block import columns, is_shared

# The variants of which the table has rows, and those whose elements of keys are staged in shared memory.
Row = Literal["closed", "closed,more", "keys", "keys,more", "staged", "staged,more", "distances", "pairs", "divided"]
VARIANTS: dict[Row, tuple[str, ...]] = {
    "closed": SPECS["closed"],
    "closed,more": SPECS["closed,more"],
    "keys": SPECS["keys"],
    "keys,more": SPECS["keys,more"],
    "staged": (f"{DOCUMENTS} output lse", "input ids: int32[batch, kv_len] mask same_document(ids)"),
    "staged,more": (
        f"{DOCUMENTS} input z: fp32[heads] score softcap(20.0) sink z[h] output lse",
        f"{DOCUMENTS} normalize sigmoid",
    ),
    "distances": SPECS["distances"],
    "pairs": SPECS["pairs"],
    "divided": SPECS["divided"],
}
# Of a tile that is always taken: with heads of 256, split operands spill 24 bytes at most; nothing else uses the tensor cores.
SMALLEST_KEYS = 16
FEW_WARPS, WARPS, MOST_WARPS = 2, 4, 8  # per block: few copy more of a tile each; up to MOST_WARPS, a thread has all registers


def _is_measured(family: Family) -> bool:
    """Whether the table has the row: four warps have one where it tells more than that of two."""
    if family.operands != "16-bit":
        return (family.warps, family.stages, family.form) == (WARPS, 1, "shared") and "staged" not in family.variant
    if "staged" in family.variant:
        return (family.warps, family.stages) == (WARPS, 1)
    return family.warps == FEW_WARPS or (family.rows, family.form) == (32, "shared")


FAMILIES = tuple(
    family
    for numbers in OPERAND_STATEMENTS
    for kind in VARIANTS
    for rows, warps, stages, q in product((32, 16), (WARPS, FEW_WARPS), (1, 2), ("shared", "registers"))
    if _is_measured(family := Family("fused_mma", kind, numbers, rows, warps, stages, q))
)


def variant(facts: SpecFacts, tile: Tile) -> Row:
    """The row of the spec in such a tile."""
    kind = without_dropout(facts)
    if kind == "plain":
        return "closed"
    return cast(Row, kind.replace("keys", "staged") if staged_of(facts, tile).keys else kind)


def room(facts: SpecFacts, arch: Arch, tile: Tile, q_in_registers: bool = False) -> Counted:
    rows, split, size = 16 * row_blocks(tile), operands(facts.spec).split, counted_head_size(facts, q_in_registers)
    if is_shared(facts.spec):  # a warp has scores of few keys beside its columns
        return Counted(0 if q_in_registers else LARGEST_HEAD, columns(facts.spec, tile))
    if facts.spec.dropout is not None:
        size = min(size + 2 * RANDOM_REGISTERS // row_blocks(tile), LARGEST_HEAD)  # as many columns of O
    if split and tile.block_kv <= SMALLEST_KEYS:
        return Counted(LARGEST_HEAD, size)
    if tile.warps > MOST_WARPS:
        return Counted(0, size)
    warps, stages = WARPS if split or tile.warps >= WARPS else FEW_WARPS, 1 if split else tile.stages
    q = "registers" if q_in_registers else "shared"
    # what reads more, or has more stages, needs no fewer registers: where ptxas found it otherwise, it had luck
    no_less = product(dict.fromkeys(("closed", variant(facts, tile))), range(1, stages + 1))
    families = (_row(Family("fused_mma", kind, split or "16-bit", rows, warps, n, q)) for kind, n in no_less)
    return counted(_as_spilled(facts, arch, tile, q_in_registers), size, tile.block_kv, *families)


def _as_spilled(facts: SpecFacts, arch: Arch, tile: Tile, q_in_registers: bool) -> Spilled:
    numbers, q = operands(facts.spec).split or "16-bit", "registers" if q_in_registers else "shared"
    kind = variant(facts, tile) + (",dropout" if facts.spec.dropout is not None else "")
    if is_shared(facts.spec):
        return spilled_kernel(kind, numbers, tile, "columns", columns(facts.spec, tile), arch)
    return spilled_kernel(kind, numbers, tile, q, counted_head_size(facts, q_in_registers), arch)


def as_spilled(plan: Plan) -> Spilled:
    return _as_spilled(plan.facts, plan.arch, plan.tile, plan.q_place == "registers")


def _row(family: Family) -> Family:
    """The row that tells of a family."""
    return family if _is_measured(family) else replace(family, warps=FEW_WARPS)


def may_hold_q(facts: SpecFacts, arch: Arch, tile: Tile) -> bool:
    """Whether the fragments of Q may stay in registers; those of split operands would take twice as many."""
    return not operands(facts.spec).split and room(facts, arch, tile, q_in_registers=True).suffices


def keys_of(family: Family) -> tuple[int, ...]:
    """The keys of the tiles that are compiled: with more, registers suffice for the smallest heads alone."""
    if "staged" in family.variant:
        return (64,)
    if family.operands != "16-bit":
        return (32,) if family.rows == 32 else (32, 64)
    return (32, 64) if family.rows == 32 else (16, 32, 64, 128)


def specs_of(family: Family) -> tuple[str, ...]:
    """In bf16 too for masks that divide: in one tile of them it takes more registers than fp16."""
    dtypes = [OPERAND_STATEMENTS[family.operands]]
    if (family.variant, family.operands) == ("divided", "16-bit"):
        dtypes.append("dtype bf16")
    return tuple(f"{dtype} {others}" for dtype in dtypes for others in VARIANTS[cast(Row, family.variant)])
