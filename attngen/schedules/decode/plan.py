"""The plan for few query rows and many keys: rows of several heads in one tile, keys split over blocks and their warps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.arch import Arch, Feature
from attngen.plan.captured_staging import Staged
from attngen.plan.choices import choice, decided
from attngen.plan.decisions import rough_decisions, row_term_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Copies
from attngen.plan.plan import Decision, Plan, Schedule, refusal
from attngen.plan.problem import Problem
from attngen.plan.register_table import Family
from attngen.plan.shared_memory import ALIGN, aligned
from attngen.plan.split_keys import INVARIANT_KEYS, Splits
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, kib, pick_tile, planned, tile_decision
from attngen.schedules.decode import memory, shares
from attngen.schedules.decode.registers import room
from attngen.schedules.parts import mma
from attngen.schedules.parts.mma import MMA_ROWS, operands
from attngen.schedules.parts.tile_of_block import width
from attngen.schedules.parts.wgmma import SLAB
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP8_DTYPES

MOST_ROWS = 16  # rows per sequence up to which `auto` takes this schedule
LEAST_KEYS = 256
BLOCKS = 1  # per SM, as the number of splits counts them: an SM has room for one of any tile
# Bytes of a block's copies under way, by measurement. With more by TMA, some SMs read faster than others, and end earlier
AHEAD: dict[Copies, int] = {"tma": 48 << 10, "cp_async": 80 << 10}
Q_REGISTERS = 32  # per thread: with more, fragments of Q are read from shared memory for each tile
WIDE = 128  # a head size of V
WHY_UNITS = "weights times scales of V that differ from key to key may exceed the range of fp16, or fall below it"
WHY_EARLY = "blocks start before the previous kernel ends and wait for its end, which saves the time between kernels"
# (keys of a warp's tile, stages, warps)
SHAPES: dict[Copies, tuple[tuple[int, int, int], ...]] = {
    "tma": ((64, 2, 2), (32, 2, 2), (32, 2, 4), (16, 2, 2), (16, 2, 4)),
    "cp_async": ((32, 3, 4), (16, 3, 4), (16, 2, 4), (16, 2, 2), (16, 2, 1)),
}
# Of 8 bits, before these: conversion to fp16 takes instructions, and of more warps one has them while others wait
SHAPES_OF_BYTES = ((32, 3, 8), (32, 2, 8), (16, 3, 8), (16, 2, 8))
SMALLEST = Tile(MMA_ROWS, 16, 2, 1)
POSSIBLE = tuple(Tile(MMA_ROWS, kv, stages, warps) for kv in (64, 32, 16) for stages in (4, 3, 2) for warps in (8, 4, 2, 1))
# Where warps have columns of O, (keys of the block's tile, stages), the fastest first
SHAPES_OF_BLOCK = ((64, 2), (32, 4), (32, 3), (32, 2), (16, 4), (16, 3), (16, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan(mma.MmaPlan):
    v_in_k: bool = choice("V", {True: ("in the tiles of K", shares.WHY_IN_KEYS)})
    in_units: bool = choice("P", {True: ("in units of its row", WHY_UNITS)})  # products of weights and scales of V, as operands
    splits: Splits  # how many blocks the keys of a tile of rows are split over
    early: bool = choice("launch", {True: ("programmatic dependent launch", WHY_EARLY)})  # a kernel starts while another runs


def why_not(facts: SpecFacts, arch: Arch) -> str:
    if facts.spec.dropout is not None:
        return "it has no dropout, which is for training, and training reads rows in blocks"
    if reason := mma.lacks(facts.spec, arch):
        return reason
    if shares.warps_have(facts.spec) == "columns":
        least = shapes_of_block(facts, arch)[-1]
        lacking = cost(facts, arch, least).why_not(arch, 32 * least.warps)
        return lacking and f"its smallest tile {lacking}"
    return ""


def types(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """What keeps it from tensors of several types."""
    if spec.is_mixed:
        q, k, v, o = spec.dtypes.values()
        if k is not v or k not in FP8_DTYPES or o is not q or q.bytes != 2:
            yield "dtype", "beside tensors of one type it has K and V of one type of 8 bits, with Q and O of one of 16"
        elif spec.head_dim % mma.MMA_ROWS or spec.head_dim_v % mma.MMA_ROWS:
            yield "head_dim", f"its rows of 8 bits have multiples of {mma.MMA_ROWS} elements"
        elif spec.normalize == "none":
            yield "normalize", "its weights are numbers of fp16 beside K and V of 8 bits, and scores may be larger"


def why_not_tma(spec: AttentionSpec) -> str:
    """Why TMA does not copy the tiles of K and V, where the architecture has it; empty if it does."""
    if mma.is_quantized(spec):
        return "numbers of 8 bits are read from padded rows, and become fp16 in registers"
    if operands(spec).split:
        return f"a row of a slab that TMA swizzles has {SLAB} numbers of 16 bits, and these have 32"
    if spec.head_dim % SLAB or spec.head_dim_v % SLAB:
        return f"TMA copies slabs of {SLAB} columns, and a head size is no multiple of that"
    if shares.warps_have(spec) == "columns" and not shares.blocks(spec, "tma"):
        least = min(shares.BLOCKS.values())
        return f"each of {least} warps has whole slabs of {SLAB} columns of V, and their number is no multiple of that"
    if spec.kernel.is_paged and (spec.kernel.page_size or 1) % MMA_ROWS:
        return f"TMA copies keys of one page at once, which requires a stated page_size, a multiple of {MMA_ROWS}"
    return ""


def copies_of(spec: AttentionSpec, arch: Arch) -> Copies:
    return "tma" if arch.has(Feature.TMA, Feature.MBARRIER) and not why_not_tma(spec) else "cp_async"


def is_for(problem: Problem) -> bool:
    """Whether `auto` takes this schedule for the lengths of a call."""
    return (problem.rows <= MOST_ROWS) & (problem.keys >= LEAST_KEYS)  # `&`: see attngen/plan/formulas.py


def q_in_registers(spec: AttentionSpec) -> bool:
    """Whether the fragments of Q stay in registers: each warp has all rows of the block. Sums of a wide O leave no room."""
    few = mma.q_registers(spec, 1) <= Q_REGISTERS and shares.warps_have(spec) == "keys"
    return few and spec.head_dim_v <= WIDE and not operands(spec).split


def cost(facts: SpecFacts, arch: Arch, tile: Tile) -> Cost:
    copies = copies_of(facts.spec, arch)
    return Cost(aligned(*memory.buffers(facts, copies, tile)), room(facts, arch, tile, copies, q_in_registers(facts.spec)))


def preferred_tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The tiles to try: those with the most bytes under way within AHEAD, then those that exceed it the least. Split operands
    need the registers of wider ones."""
    if shares.warps_have(facts.spec) == "columns":
        return shapes_of_block(facts, arch)
    copies, possible = copies_of(facts.spec, arch), possible_tiles(facts, arch)
    shapes = (*(SHAPES_OF_BYTES if mma.is_quantized(facts.spec) else ()), *SHAPES[copies])
    usual = [t for shape in shapes if (t := Tile(MMA_ROWS, *shape)) in possible]
    narrow = [t for t in usual if t.block_kv == MMA_ROWS or not operands(facts.spec).split]
    more = {t: under_way(facts, arch, t) - AHEAD[copies] for t in narrow}
    return (*sorted(narrow, key=lambda t: (more[t] > 0, abs(more[t]))), SMALLEST)


def shapes_of_block(facts: SpecFacts, arch: Arch, packed_rows: int = 0) -> tuple[Tile, ...]:
    """The tiles to try where warps have columns of O, the one that takes the least last: of no more rows than `packed_rows`, or
    than a group of query heads has. Split operands need the registers of more keys."""
    spec, copies = facts.spec, copies_of(facts.spec, arch)
    most, keys = (
        max(packed_rows or spec.stated_group, MMA_ROWS),
        MMA_ROWS if operands(spec).split else _most_keys(spec, copies),
    )
    blocks = {rows: warps for rows, warps in shares.blocks(spec, copies).items() if rows <= most}
    return tuple(
        Tile(rows, kv, stages, warps) for rows, warps in blocks.items() for kv, stages in SHAPES_OF_BLOCK if kv <= keys
    )


def _most_keys(spec: AttentionSpec, copies: Copies) -> int:
    """The most keys of a block's tile. Of paged keys that cp.async copies, each lane finds one."""
    return 32 if spec.kernel.is_paged and copies == "cp_async" else 64


def under_way(facts: SpecFacts, arch: Arch, tile: Tile) -> int:
    """Bytes of a block's copies that are under way while its warps multiply a tile each."""
    buffers = memory.key_buffers(facts.spec, copies_of(facts.spec, arch), tile)
    return sum(b.bytes for b in buffers) // tile.stages * (tile.stages - 1)


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(facts, arch), *possible_tiles(facts, arch)), lambda t: cost(facts, arch, t))


def possible_tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The tiles that may be stated. Of paged keys, each lane finds one."""
    if shares.warps_have(facts.spec) == "columns":
        return _possible_of_block(facts, arch)
    return tuple(t for t in POSSIBLE if t.block_kv <= 32) if facts.spec.kernel.is_paged else POSSIBLE


def _possible_of_block(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    spec, copies = facts.spec, copies_of(facts.spec, arch)
    keys = [kv for kv in (64, 32, 16) if kv <= _most_keys(spec, copies)]
    blocks = shares.blocks(spec, copies)
    return tuple(Tile(rows, kv, stages, blocks[rows]) for rows in blocks for kv in keys for stages in (4, 3, 2))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec = facts.spec
    if reason := why_not(facts, arch):
        raise refusal("kernel", f"kernel decode on {arch.name}", reason, "use kernel fused")
    tile = pick_tile(spec, arch, preferred_tiles(facts, arch), possible_tiles(facts, arch), lambda t: cost(facts, arch, t))
    return with_tile(schedule, facts, arch, tile)


def of_rows(schedule: Schedule, facts: SpecFacts, arch: Arch, rows: int) -> Plan:
    """The plan for calls of at least `rows` packed rows, if a spec's tile may have more than 16."""
    preferred = (
        shapes_of_block(facts, arch, rows) if shares.warps_have(facts.spec) == "columns" else preferred_tiles(facts, arch)
    )
    return with_tile(schedule, facts, arch, pick_tile(facts.spec, arch, preferred, (), lambda t: cost(facts, arch, t)))


def row_counts(facts: SpecFacts, arch: Arch) -> tuple[int, ...]:
    """The numbers of packed rows whose plans may differ, the largest first."""
    if shares.warps_have(facts.spec) == "keys":
        return (MMA_ROWS,)
    return tuple(shares.blocks(facts.spec, copies_of(facts.spec, arch)))


def of_family(schedule: Schedule, family: Family, facts: SpecFacts, arch: Arch, keys: int) -> Plan | None:
    tile = Tile(family.rows, keys, family.stages, family.warps)
    return with_tile(schedule, facts, arch, tile) if copies_of(facts.spec, arch) == family.form else None


def with_tile(schedule: Schedule, facts: SpecFacts, arch: Arch, tile: Tile) -> Plan:
    spec = facts.spec
    numbers = operands(spec)
    alone = arch.shared_per_sm // 2 - arch.shared_reserved + ALIGN  # bytes of shared memory: a second block would not fit an SM
    unrolled = 4 if spec.head_dim_v <= WIDE else 2  # sums of O leave fewer registers
    holds, copies = q_in_registers(spec), copies_of(spec, arch)
    own = DecodePlan.of(
        spec,
        tile,
        warps_have=shares.warps_have(spec),
        v_in_k=shares.values_in_keys(spec, copies, tile),
        v_width=width(spec, tile),
        in_units=shares.in_units(spec),
        key_warps=tile.warps if shares.warps_have(spec) == "keys" else 1,
        splits=splits_of(spec, tile),
        copies=copies,
        q_in_registers=holds,
        unrolled=unrolled,
        early=arch.has(Feature.GRID_DEPENDENCY),
    )
    staged = Staged(terms=facts.row_terms)
    of_q = mma.q_registers(spec, 1)
    ahead = kib(BLOCKS * under_way(facts, arch, tile))
    t = mma.product_dtype(spec)
    decisions = (
        Decision("schedule", "decode", f"{t} on tensor cores (mma.sync, which {arch.name} has), for few rows and many keys"),
        Decision("auto takes it", f"for calls of {FEW}", WHY_AUTO),
        *rough_decisions(facts),
        *decided(own, facts, "early", "split"),
        *row_term_decisions(staged),
        *([Decision("products", f"fp16, of {spec.dtypes['k']}", WHY_HALVES)] if own.quantized else []),
        *([Decision("steps of Q K^T side by side", str(unrolled), WHY_UNROLLED)] if numbers.split else []),
        Decision("rows", "those of all heads that share keys", WHY_PACKED),
        tile_decision(spec, tile, f"the rows of one product, and the keys of {shares.OWNERS[own.warps_have]}"),
        Decision("blocks per SM", str(BLOCKS), WHY_ALONE[copies]),
        Decision("splits", *(WHY_INVARIANT if spec.kernel.batch_invariant else WHY_SPLITS)),
        Decision("warps", str(tile.warps), shares.WHY_WARPS[own.warps_have]),
        Decision("stages", str(tile.stages), f"while a tile is used, copies of {ahead} are under way on each SM"),
        *decided(own, facts, "v_in_k"),
        *copies_decisions(spec, arch),
        Decision("Q", "in registers" if holds else "in shared memory", f"its fragments take {of_q} registers a thread"),
        Decision("partial results", "O before division by l, with m and l", WHY_SUMS)
        if spec.normalize == "softmax"
        else PLAIN_SUMS,
        Decision("rows in shared memory", LAYOUT[copies].format(own.chunk), mma.WHY_PAD),
    )
    workspaces = ("split_O", "split_max", "split_sum") if spec.normalize == "softmax" else ("split_O",)
    placed = memory.buffers(facts, copies, tile)
    more = {"staged": staged, "blocks": BLOCKS, "least_shared": alone if copies == "tma" else 0, "workspaces": workspaces}
    return planned(schedule, facts, arch, tile, decisions, placed, own, **more)


def copies_decisions(spec: AttentionSpec, arch: Arch) -> Iterator[Decision]:
    """How K and V are copied, where there is a choice."""
    if copies_of(spec, arch) == "tma":
        yield Decision("K and V", "copied by TMA", WHY_TMA)
    elif arch.has(Feature.TMA):
        yield Decision("K and V", "copied by cp.async", why_not_tma(spec))


def splits_of(spec: AttentionSpec, tile: Tile) -> Splits:
    if spec.kernel.batch_invariant:
        return Splits(tile.block_q, INVARIANT_KEYS, 0)
    at_once = tile.block_kv * (tile.warps if shares.warps_have(spec) == "keys" else 1)
    return Splits(tile.block_q, at_once, BLOCKS)


WHY_AUTO = (
    "other schedules would have few blocks, because a block has the rows of one head; each block would read all keys, and each "
    "query head would read them again"
)
FEW = f"at most {MOST_ROWS} query rows and at least {LEAST_KEYS} keys"
FOR_AUTO = (f"calls of {FEW}", "by decode", "keys are split over blocks there, and read once for the heads that share them")
WHY_TMA = "one lane copies 64 columns of a tile by one instruction: memory is read 3 to 4% faster than 16 bytes at a time"
LAYOUT: dict[Copies, str] = {"tma": "K and V swizzled, Q padded by {}", "cp_async": "padded by {}"}
WHY_ALONE: dict[Copies, str] = {
    "tma": "with more copies under way, some SMs would read faster than others, and the last would end later; so a block takes "
    "more than half of an SM's shared memory",
    "cp_async": "more blocks would read memory in smaller pieces, which is slower",
}
WHY_HALVES = (
    "fp16 has all their numbers, and memory is read half as often as for 16 bits; a row of Q is multiplied by a power of 2 if "
    "fp16 cannot hold its numbers"
)
WHY_UNROLLED = "a step waits for its six products in turn, and there is one warp for each part of an SM that multiplies"
WHY_PACKED = "keys are read once for all of them; a product has 16 rows even if there are fewer"
WHY_SPLITS = ("by sizes and multiprocessors", "as many as keep all multiprocessors reading keys until the end")
WHY_INVARIANT = (
    f"one for about {INVARIANT_KEYS} keys",
    "batch_invariant: the number depends on kv_len alone, so a sequence has the same bits in any batch",
)
WHY_SUMS = "as exact as without splits; an lse instead of m and l would lose the last bits of l if m is large"
PLAIN_SUMS = Decision("partial results", "sums", "without a softmax nothing is needed to add them up")
