"""The form of the backward whose blocks of keys also add to dQ, in global memory: five products of tiles instead of seven.

A warp owns the pairs of 32 keys, so that a fragment from shared memory serves two products. If a thread has no registers for dK
and dV of 32 keys, warps share them: each has S and dP for its share of a tile's rows, dK and dV for its share of the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from attngen.diagnostics import counted
from attngen.plan.arch import Arch, Feature
from attngen.plan.decisions import addition_decisions, delta_decisions, saved_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.saved import saved_results
from attngen.plan.shared_memory import COLUMN, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.plan.variants import gathers
from attngen.schedules.fused_mma.backward_needs import (
    OTHER_REGISTERS,
    WARPS_OF_AN_SM,
    DqPart,
    FusedMmaBackwardPlan,
    blocks_of_an_sm,
    classifies,
    first_decisions,
    last_decisions,
    own_plan,
    values_of_rows,
    widths,
)
from attngen.schedules.fused_mma.needs import CAPTURED_REGISTERS, classified_tiles
from attngen.schedules.parts.mma import MMA_ROWS, chunk, operands
from attngen.schedules.parts.tile_of_block import is_shared
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV

CHUNKED = 64  # registers of a thread for dQ from which it goes out in two chunks
KERNELS = ("delta", "dk_dv", "convert_dq")
ROW_BLOCKS = 2  # blocks of 16 keys per warp
SUMS = 128  # registers of a thread for dK and dV, beside S and dP of 32 columns
SPLIT_SUMS = 64  # the same where each number is two
PARTS = (32, 16)  # columns of S and dP that may be multiplied at once
OUTPUT_ROWS = (32, 16)  # rows of dQ that a warp multiplies
ROWS = (64, 128, 32)  # per tile, the preferred first
POSSIBLE = tuple(
    Tile(rows, keys, stages, warps) for rows in ROWS for keys in (128, 64, 32) for warps in (8, 4, 2, 1) for stages in (2, 1)
)


# Of heads so wide that 8 warps share their keys: rows and keys of a tile. A warp computes 16 x 16 pairs, and multiplies all
WIDE_TILES = tuple(Tile(rows, 32, 1, 8) for rows in (64, 32))
WIDE_CHUNKS = 4  # in which a warp's part of dQ goes out


def adds(facts: SpecFacts, arch: Arch) -> bool:
    """Whether blocks of keys add to dQ: its last bits may differ between runs, and the sums of S and dP have a use for all."""
    spec = facts.spec
    suits = spec.normalize == "softmax" and spec.dropout is None and {*facts.wanted} == {*QKV}
    return suits and not facts.deterministic and bool(tiles(facts, arch))


def shares(tile: Tile) -> int:
    """The warps that have the same keys."""
    return tile.warps * MMA_ROWS * ROW_BLOCKS // tile.block_kv


def dq_part(spec: AttentionSpec, tile: Tile, added: int) -> DqPart:
    """The part whose padding of the head size is the least, of more rows if both are equal: it reads less."""
    possible = [n for n in OUTPUT_ROWS if tile.block_q % n == 0 and tile.warps % (tile.block_q // n) == 0]
    rows = min(possible, key=lambda n: _qk_width(spec, tile, n))
    columns = _qk_width(spec, tile, rows) * tile.block_q // rows // tile.warps
    if is_shared(spec):
        chunks = next(n for n in (WIDE_CHUNKS, 2, 1) if columns % (n * MMA_ROWS) == 0)
        return DqPart(rows, columns // chunks, chunks, added)
    chunks = 2 if columns % (2 * MMA_ROWS) == 0 and rows * columns // 32 >= CHUNKED and shares(tile) > 2 else 1
    return DqPart(rows, columns // chunks, chunks, added)


def _qk_width(spec: AttentionSpec, tile: Tile, rows: int) -> int:
    """The head size rounded up so that each warp has whole fragments of dK, and of `rows` rows of dQ."""
    step = MMA_ROWS * lcm(shares(tile), tile.warps * rows // tile.block_q)
    return -(-spec.head_dim // step) * step


def widths_of(spec: AttentionSpec, tile: Tile) -> tuple[int, int]:
    """Of rows of Q and K, and of V and dO, in shared memory."""
    part, step = dq_part(spec, tile, 1), MMA_ROWS * shares(tile)
    return _qk_width(spec, tile, part.rows), -(-spec.head_dim_v // step) * step


def part_of(facts: SpecFacts, arch: Arch, tile: Tile) -> int:
    """The columns of S and dP that are multiplied at once, a warp's or half of them."""
    others = OTHER_REGISTERS + (CAPTURED_REGISTERS if gathers(facts.spec) else 0)
    of_rest = sum(widths(facts.spec)) // shares(tile) + others
    limit, own = arch.max_registers_per_thread - of_rest, tile.block_q // shares(tile)
    return next((n for n in PARTS if n <= own and ROW_BLOCKS * n <= limit), PARTS[-1])


def buffers(facts: SpecFacts, tile: Tile) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block: its keys, tiles of rows, and what warps tell each other of a tile."""
    spec, stages = facts.spec, tile.stages
    qk, v = widths_of(spec, tile)

    def rows(name: str, shape: tuple[int, ...], use: str) -> SharedBuffer:
        return SharedBuffer(name=name, element=spec.dtype.name, shape=shape, use=use, pad=chunk(spec), read=COLUMN)

    return (
        rows("K", (tile.block_kv, qk), "the block's keys, in the end dK"),
        rows("V", (tile.block_kv, v), "the block's values, in the end dV"),
        rows("Q", (stages, tile.block_q, qk), "a tile of queries"),
        rows("DO", (stages, tile.block_q, v), "a tile of rows of dO"),
        *(
            [rows("P", (tile.block_kv, tile.block_q), "P^T of a tile, for the other warps of the same keys")]
            if shares(tile) > 1
            else []
        ),
        rows("DS", (tile.block_kv, tile.block_q), "dS^T of a tile, for all warps"),
        values_of_rows(facts, tile),
        *([classified_tiles(tile)] if classifies(facts) else []),
    )


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    """What a tile takes: registers do not decide, `tiles` has those whose sums fit."""
    copiers = max(widths_of(facts.spec, tile)) // chunk(facts.spec)  # threads per row: one for each of its chunks
    return Cost(shared_bytes(facts, tile), threads=copiers)


def shared_bytes(facts: SpecFacts, tile: Tile) -> int:
    return aligned(*buffers(facts, tile))


@remembered
def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The tiles that fit: first those of many keys, which add little to dQ, with enough warps on an SM, and two stages."""
    if is_shared(facts.spec):
        possible = [t for t in WIDE_TILES if _sums(facts.spec, t.warps) <= _most_sums(facts.spec) * t.warps]
        return fitting(arch, possible, lambda t: cost(facts, t))
    fit = fitting(arch, [t for t in POSSIBLE if _divides(facts.spec, t)], lambda t: cost(facts, t))

    def order(tile: Tile) -> tuple[int, int, int, int]:
        warps = min(tile.warps * blocks_of_an_sm(facts, arch, tile, shared_bytes), WARPS_OF_AN_SM)
        return -tile.block_kv, -warps, ROWS.index(tile.block_q), -tile.stages

    return tuple(sorted(fit, key=order))


def _most_sums(spec: AttentionSpec) -> int:
    return SPLIT_SUMS if operands(spec).split else SUMS


def _sums(spec: AttentionSpec, sharing: int) -> int:
    """Columns of dK and dV, each rounded up to whole fragments of all warps that share keys."""
    step = MMA_ROWS * sharing
    return sum(-(-width // step) * step for width in widths(spec))


def _divides(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether warps have whole fragments of a tile, and no more of them share keys than their sums need."""
    sharing = shares(tile)
    if sharing < 1 or tile.warps % sharing or tile.block_q // sharing < MMA_ROWS or tile.warps < tile.block_q // OUTPUT_ROWS[0]:
        return False
    part = dq_part(spec, tile, 1)
    needed = next(n for n in (1, 2, 4, 8, 16) if _sums(spec, n) <= _most_sums(spec) * n)
    return sharing == needed and part.rows * part.columns * part.chunks // 32 <= SUMS // 2


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch, fitting_tiles: tuple[Tile, ...]) -> Plan:
    spec = facts.spec
    tile = pick_tile(spec, arch, fitting_tiles, fitting_tiles, lambda t: cost(facts, t))
    added = dq_part(spec, tile, 4 if arch.has(Feature.RED_V4) else 1)
    wide, both = is_shared(spec), widths_of(spec, tile)
    part = PARTS[-1] if wide else part_of(facts, arch, tile)
    how = {"shares": shares(tile), "dq_part": added, "adding": "all_rows" if wide else "own_rows"}
    own = own_plan(facts, tile, KERNELS, part, both, "additions", **how)
    blocks = blocks_of_an_sm(facts, arch, tile, shared_bytes)
    return planned(
        schedule,
        facts,
        arch,
        tile,
        tuple(_decisions(facts, arch, tile, own, blocks)),
        buffers(facts, tile),
        own,
        blocks=blocks,
        saved=saved_results(facts),
        workspaces=("delta", "dq_sums"),
    )


def _decisions(facts: SpecFacts, arch: Arch, tile: Tile, own: FusedMmaBackwardPlan, blocks: int) -> Iterator[Decision]:
    assert own.dq_part is not None
    spec, part = facts.spec, own.dq_part
    yield from first_decisions(facts, arch)
    yield from addition_decisions()
    yield from saved_decisions(saved_results(facts))
    yield from delta_decisions(own.delta)
    yield tile_decision(spec, tile, f"many keys: less is added to dQ; an SM has room for {counted(blocks, 'such block')}")
    keys = MMA_ROWS * ROW_BLOCKS
    yield Decision("warps", str(tile.warps), f"{keys} keys each, and a fragment of a tile serves two products")
    if own.shares > 1:
        sums = (own.qk_width + own.v_width) * ROW_BLOCKS // 2
        because = f"{sums} sums a thread would spill: each has a share of the rows of S and dP, and of the columns of dK and dV"
        yield Decision("warps that share keys", str(own.shares), because)
    yield Decision("warp's part of dQ", f"{part.rows} x {part.columns}", "of a tile: dS of all keys is in shared memory")
    if part.added > 1:
        yield Decision("additions at once", str(part.added), f"of neighbours: {arch.name} has such an instruction")
    yield from last_decisions(facts, arch, tile, own, shared_bytes)
