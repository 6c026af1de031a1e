"""The schedule for Hopper: warpgroups with roles, one that copies tiles by TMA and two to four that multiply them by wgmma."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from attngen.diagnostics import counted
from attngen.plan.affine_scores import AffineScore
from attngen.plan.arch import Arch
from attngen.plan.axes import ROWS
from attngen.plan.captured_staging import Staged
from attngen.plan.choices import decided
from attngen.plan.decisions import WHY_PAIRS, maximum_decisions, row_term_decisions, score_decisions
from attngen.plan.distances import divides_places
from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.prepared import scales_keys
from attngen.plan.tile import Tile
from attngen.plan.tile_search import fitting, pick_tile, planned, tile_decision
from attngen.schedules.hopper import needs
from attngen.schedules.hopper import tiles as hopper_tiles
from attngen.schedules.hopper.by_lengths import ByLengths
from attngen.schedules.hopper.choices import BesideLast, HopperPlan, RowSums
from attngen.schedules.hopper.tiles import MaskClass, TileTiming, consumers
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, WHY_SLABS, refuse
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import names_in
from attngen.spec.operator import ZERO
from attngen.spec.print_attn import expression_to_text

T = TypeVar("T")


ONES = 8  # columns beside V: the step of a wgmma's N
HEAVY_OF_ROOT = 0.75  # times the root of kv_len: `heavy` in long rows, where rounding errors add up to that root
SUM_REGISTERS = 2  # the sums of a thread's two rows
MAX_COLUMNS = 256  # N of a wgmma
WHY_LENGTHS = "the fastest for these lengths, by its rate in the loop and the extra cost of each block of rows"
TENSOR_BOUND = 512  # head_dim + head_dim_v from which products hide a few more instructions of the softmax


def added_once(facts: SpecFacts) -> AffineScore | None:
    """The score's affine term if rows keep a maximum: it is added once per tile and row, and subtracted with the maximum.

    None with an lse, whose error bound is smaller: the order of these additions differs from the score's.
    """
    softmax = facts.spec.normalize == "softmax" and facts.shift is None
    return facts.affine_score if softmax and not facts.spec.lse else None


def adapts_slack(facts: SpecFacts) -> bool:
    """Whether the rescaling threshold of a row is computed from its first tile, so that its heaviest weights are exact.

    Only if all rows have the same keys: otherwise rows with few keys have the largest errors, which no threshold changes.
    """
    return facts.spec.normalize == "softmax" and facts.spec.mask is None and facts.shift is None


def from_first_tile(facts: SpecFacts) -> bool:
    """Whether tiles are visited from the first to the last: if their visits are found by classification, which goes on from the
    first; or if the score falls from key to key, since a row maximum that rises with each tile rescales O each time."""
    falls = facts.affine_score is not None and facts.affine_score.falls
    return facts.bounds.per_tile or (falls and facts.spec.normalize == "softmax")


def row_sums(facts: SpecFacts, arch: Arch, tile: Tile) -> RowSums:
    """How the softmax denominator is computed: by columns of ones beside V, or by each thread.

    Rounding the heaviest weights in the sum as in P keeps their rounding error out of O. An lse needs the unrounded weights.
    """
    spec = facts.spec
    # with dropout, or scales of keys, the sums are not those of P
    if spec.normalize != "softmax" or spec.lse or spec.dropout is not None or scales_keys(spec):
        return "weights"
    columns = spec.head_dim_v % SLAB == 0 and spec.head_dim_v + ONES <= MAX_COLUMNS
    of_q = needs.q_registers(spec) if needs.q_in_registers(facts, tile) else 0
    fits = needs.has_registers(facts, tile, of_q + ONES // 2 - SUM_REGISTERS)
    sizes = spec.head_dim + spec.head_dim_v
    # Three consumers hide so much of each other's softmax that additions cost less; heavy weights are exact without them
    exact = adapts_slack(facts) and consumers(tile) == 3 and 2 * sizes >= TENSOR_BOUND
    if columns and fits and not exact and needs.shared_bytes(facts, tile, ones=True) <= arch.shared_per_block:
        return "products"
    return sums_of_threads(facts)


def sums_of_threads(facts: SpecFacts) -> RowSums:
    """How threads compute the softmax denominator."""
    spec = facts.spec
    if spec.normalize != "softmax" or spec.lse or spec.dropout is not None:
        return "weights"
    keeps_slack = not adapts_slack(facts) and facts.shift is None
    tensor_bound = spec.head_dim + spec.head_dim_v >= TENSOR_BOUND
    return "weights, the heaviest rounded" if tensor_bound and keeps_slack else "weights"


@remembered
def kind(facts: SpecFacts) -> MaskClass:
    bounds = facts.bounds
    if bounds.per_tile:
        return "classified"
    if facts.spec.normalize != "softmax":
        return "other"
    if facts.spec.score != S:
        return "other" if facts.shift is not None else "scored"
    if bounds.begin is ZERO:
        return "plain"
    return "window" if bounds.exact else "other"


def of_head_size(spec: AttentionSpec, table: Mapping[int, tuple[T, ...]]) -> tuple[T, ...]:
    size = max(spec.head_dim, spec.head_dim_v)
    return next((row for limit, row in table.items() if size <= limit), ())


def preferred_tiles(facts: SpecFacts) -> tuple[Tile, ...]:
    """The tiles to try, the fastest first. Two warps copy elements of pairs, for two consumers.

    Masks that divide a distance by a param have pairs in each tile, which three consumers evaluate the fastest. For those that
    divide rows and keys, tiles of 128 and 64 keys come first if registers allow: the blocks of such a mask have these sides,
    and would have an edge in each tile of 96 keys.
    """
    usual = of_head_size(facts.spec, hopper_tiles.PREFERRED)
    if kind(facts) == "classified" or needs.staged_pairs(facts):
        usual = tuple(t for t in usual if consumers(t) == 2)
    if not facts.divided_distances(2, SLAB):
        return usual
    three = hopper_tiles.tile(3, SLAB, 3)
    first = () if divides_places(facts.spec) or not needs.has_registers(facts, three) else (three,)
    whole = (*(t for t in usual if t.block_kv % SLAB == 0), hopper_tiles.tile(2, SLAB, 2))
    roomy = (t for t in whole if needs.has_registers(facts, t, needs.remainder_registers(facts, t)))
    return (*first, *roomy, *usual)


@remembered
def paces(facts: SpecFacts) -> tuple[TileTiming, ...]:
    """The measured tiles that fit the registers: the lengths of a call select one of them. With dropout, those of whole calls
    of Philox: a tile of 48 or 80 keys would use half of the bits of each call."""
    if needs.staged_pairs(facts):
        return ()
    measured = [p for p in of_head_size(facts.spec, hopper_tiles.timings()) if kind(facts) in p.serves]
    whole = needs.CALL_KEYS if facts.spec.dropout is not None else 1
    return tuple(p for p in measured if needs.has_registers(facts, p.tile) and p.tile.block_kv % whole == 0)


def by_lengths(facts: SpecFacts) -> ByLengths | None:
    """The choice by the lengths of a call; None if one tile serves all lengths."""
    several = facts.spec.kernel.is_planned and len(paces(facts)) > 1
    return ByLengths(facts.bounds, paces(facts)) if several else None


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(facts), *hopper_tiles.POSSIBLE), lambda t: needs.cost(facts, t))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    refuse(facts, arch, "hopper", facts.cost_beside_terms)
    tile = pick_tile(facts.spec, arch, preferred_tiles(facts), hopper_tiles.POSSIBLE, lambda t: needs.cost(facts, t))
    return with_tile(schedule, facts, arch, tile, WHY_TILE)


def choices(facts: SpecFacts, arch: Arch, tile: Tile) -> HopperPlan:
    sums, groups = row_sums(facts, arch, tile), consumers(tile)
    producer, consumer = needs.register_split(facts, tile)
    holds, per_consumer = needs.q_in_registers(facts, tile), needs.own_tiles(facts, tile)
    lanes_load = facts.bounds.per_tile or bool(facts.staged.keys)
    out = needs.output_slabs(facts, arch, tile, sums == "products")
    return HopperPlan(
        consumers=groups,
        producer_registers=producer,
        consumer_registers=consumer,
        q_in_registers=holds,
        output_slabs=out,
        row_sums=sums,
        shift=facts.shift,
        per_consumer_range=per_consumer,
        from_first_tile=from_first_tile(facts),
        adaptive_threshold=adapts_slack(facts),
        beside_last=beside_last(facts, holds, per_consumer),
        replaces_output=replaces_output(facts),
        # with more than two consumers, the rows of a slow one would hold up the values of the others
        values_after_queries=holds or groups == 2,
        warp_loads_keys=lanes_load,
        warps_release=lanes_load or per_consumer,
        pair_slots=needs.pair_slots(facts, arch, tile, out, sums == "products"),
        # ptxas then puts conversions between exponentials. At head size 64, scores as they are gain 2 to 4%; ALiBi lost 1.4%;
        # at 128, key vectors leave too few registers for it
        rescales_last=facts.spec.score == S and not (facts.staged.keys and facts.spec.head_dim > 64),
    )


def with_tile(schedule: Schedule, facts: SpecFacts, arch: Arch, tile: Tile, why: str = WHY_LENGTHS) -> Plan:
    spec, own, affine = facts.spec, choices(facts, arch, tile), added_once(facts)
    t, out = spec.dtype.name, own.output_slabs
    staged = replace(facts.staged, pairs=needs.staged_pairs(facts) if own.pair_slots else (), terms=facts.row_terms)
    why_registers = f"copying needs few; about {needs.registers(facts, tile)} hold O, S and P"
    decisions = (
        Decision("schedule", "hopper", f"{t} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"),
        *score_decisions(facts),
        *maximum_decisions(facts),
        *affine_decisions(affine),
        Decision("warpgroups", f"1 + {own.consumers}", f"one copies; {own.consumers} {WHY_GROUPS}"),
        tile_decision(spec, tile, why),
        Decision("stages", str(tile.stages), "later tiles are copied while one is used"),
        Decision("registers", f"{own.producer_registers} and {own.consumer_registers} a thread", why_registers),
        *decided(own, facts),
        Decision("blocks", "one for each SM", WHY_PERSISTENT),
        Decision("swizzle", "128 bytes", WHY_SLABS),
        *staging_decisions(staged, own.pair_slots),
    )
    buffers = needs.buffers(facts, tile, out, own.row_sums == "products", own.pair_slots)
    more = {"consumer_rows": WARPGROUP_ROWS if own.per_consumer_range else 0, "staged": staged, "affine": affine}
    return planned(schedule, facts, arch, tile, decisions, buffers, own, **more)


def beside_last(facts: SpecFacts, holds_q: bool, per_consumer: bool) -> BesideLast:
    """What overlaps the last P V: nothing if tiles of other consumers follow, which are skipped before the next work tile."""
    last = facts.bounds.end if from_first_tile(facts) else facts.bounds.begin
    if per_consumer and names_in(last) & {ROWS.lo.name, ROWS.hi.name}:
        return "nothing"
    return "next scores" if holds_q else "next work tile"


def replaces_output(facts: SpecFacts) -> bool:
    """Whether the first P V replaces O: a register must be free for the flag."""
    return facts.shift is None and not any(e.in_score for e in facts.staged.keys)


def affine_decisions(affine: AffineScore | None) -> Iterator[Decision]:
    if affine is not None:
        yield Decision(f"score's {expression_to_text(affine.term)}", "once for a row and tile", WHY_AFFINE)


def staging_decisions(own: Staged, pair_slots: int) -> Iterator[Decision]:
    if own.keys:
        vectors = ", ".join(expression_to_text(e.expr) for e in own.keys)
        yield Decision("key vectors", vectors, WHY_KEYS)
    if own.rows:
        elements = ", ".join(expression_to_text(e.expr) for e in own.rows)
        yield Decision("row elements", elements, "each thread has two rows: it reads theirs once, under the first product")
    yield from row_term_decisions(own)
    for e in own.pairs:
        where = f"in shared memory, {counted(pair_slots, 'tile')} of each consumer"
        yield Decision(expression_to_text(e.expr), where, WHY_PAIRS)


WHY_GROUPS = "compute 64 rows each: one computes weights while the products of another run"
WHY_PERSISTENT = "a persistent kernel: each block takes work tiles from a counter, those with the most keys first"
WHY_KEYS = (
    "in shared memory: the producer reads them while it waits for a stage, where a consumer would read each pair's from global "
    "memory between its products"
)
WHY_AFFINE = "affine in k: each key adds a multiple of the slope, where each pair would convert its distance to a float"
WHY_TILE = "the first preferred tile whose O, S and P fit a consumer's registers, and whose stages fit shared memory"
