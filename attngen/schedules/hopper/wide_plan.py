"""The plan of the Hopper schedule for wide heads: two warpgroups have the same 64 rows, and half of O's columns each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from attngen.plan.arch import Arch
from attngen.plan.choices import choice, decided
from attngen.plan.decisions import maximum_decisions, score_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.room import Estimated
from attngen.plan.shared_memory import WORK_TILE, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.schedules.hopper import needs
from attngen.schedules.hopper import plan as hopper
from attngen.schedules.hopper.choices import BesideLast, HopperPlan
from attngen.schedules.parts import wgmma
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec

Output = Literal["beside", "over"]  # Q: `templates/parts/hopper_wide/output_NAME_queries.j2`
CONSUMERS = 2
WARPS = 4 * (CONSUMERS + 1)
# Of a thread of each warpgroup: multiples of 8, together those of the launch. The second consumer has neither S nor P.
PRODUCER_REGISTERS, SCORER_REGISTERS, FOLLOWER_REGISTERS = 88, 240, 176
PART_SLABS = 3  # slabs of a part of K, at most: a part is 16 or 24 KB of 64 keys
PREFERRED = tuple(Tile(WARPGROUP_ROWS, kv, 1, WARPS) for kv in (64, 48, 32, 16))
POSSIBLE = tuple(Tile(WARPGROUP_ROWS, kv, s, WARPS) for kv in (128, 96, 80, 64, 48, 32, 16) for s in (3, 2, 1))


def value_slabs(spec: AttentionSpec) -> int:
    """Slabs of V, and of O: at least one for each consumer."""
    return max(slabs(spec.head_dim_v), CONSUMERS)


def most_slabs(spec: AttentionSpec) -> int:
    """Those of the second consumer: half of them, or one more than the first has, which needs registers for scores too."""
    return -(-value_slabs(spec) // 2)


def key_parts(spec: AttentionSpec) -> int:
    """Parts of a tile of K, by columns."""
    every = slabs(spec.head_dim)
    return every // max(n for n in range(1, PART_SLABS + 1) if every % n == 0)


def value_parts(spec: AttentionSpec, tile: Tile) -> int:
    """Parts of a tile of V, by keys: two where whole steps of 16 keys allow it. Keys in pages are copied page by page."""
    return 2 if tile.block_kv % 32 == 0 and not spec.kernel.is_paged else 1


def _parts(own: WidePlan, facts: SpecFacts) -> tuple[str, str]:
    of_k, of_v = f"K in {own.key_parts}, by columns", f"V in {own.value_parts}, by keys, for each consumer"
    return f"{of_k}; {of_v}", "each is copied as soon as the products have read its place: there is no room for a second tile"


def _output(own: WidePlan, facts: SpecFacts) -> tuple[str, str]:
    return (
        f"{own.output_slabs} of {most_slabs(facts.spec)} slabs a warp",
        "of 64 columns; TMA copies them to global memory in the background",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WidePlan(HopperPlan):
    """Warp specialization: one warpgroup copies, one computes weights, and that and a third multiply V."""

    beside_last: BesideLast = "nothing"
    replaces_output: bool = False
    output_slabs: int = choice("O in shared memory", _output)
    value_slabs: int  # slabs of 64 columns of V, and of O: the second consumer has one more if they are odd
    key_parts: int
    value_parts: int = choice("parts of tiles", _parts)
    output: Output  # where O lies on its way to global memory
    weight_stages: int  # tiles of weights on their way from the first consumer to the second


def buffers(
    facts: SpecFacts, tile: Tile, output: Output = "over", output_slabs: int = 1, weight_stages: int = 1
) -> tuple[SharedBuffer, ...]:
    spec = facts.spec
    t, kv, stages = spec.dtype.name, tile.block_kv, tile.stages
    of_k, of_v = key_parts(spec), value_parts(spec, tile)
    d = slabs(spec.head_dim)
    mbarriers = 4 + 2 * stages * (of_k + 2 * of_v) + 2 * weight_stages
    of_tiles = f"of {stages} tile{'s' if stages > 1 else ''}, in parts of"
    staged = facts.staged

    def words(name: str, shape: tuple[int, ...], use: str, element: str = "int") -> SharedBuffer:
        return SharedBuffer(name=name, element=element, shape=shape, use=use)

    own_output = slab_tiles("O", t, (4 * CONSUMERS, output_slabs, 16), needs.OUTPUT_ROWS, read=None)
    return (
        slab_tiles("Q", t, (d, WARPGROUP_ROWS), "the query rows", then="O" if output == "over" else ""),
        slab_tiles("K", t, (stages, of_k, d // of_k, kv), f"the keys {of_tiles} their columns"),
        slab_tiles(
            "V", t, (stages, of_v, value_slabs(spec), kv // of_v), f"the values {of_tiles} their keys, for each consumer"
        ),
        slab_tiles("WEIGHTS", t, (weight_stages, slabs(kv), WARPGROUP_ROWS), "P, for the second consumer"),
        *([own_output] if output == "beside" else []),
        words("NOTICES", (weight_stages, 4 + WARPGROUP_ROWS), "what the second consumer does with O before", "float"),
        words("BARRIERS", (mbarriers,), "see the kernel", "mbarrier"),
        words("WORK_TILES", (2, len(WORK_TILE)), "which rows and head are current, and were before"),
        *([needs.visits(stages)] if facts.bounds.per_tile else []),
        *([staged.buffer(kv, stages + 1)] if staged.keys else []),
    )


def registers(facts: SpecFacts, tile: Tile) -> int:
    """Registers that a thread of the first consumer needs: its columns of O, scores, weights, and the rest."""
    output, scores = 32 * (value_slabs(facts.spec) // 2), tile.block_kv // 2
    dropped = needs.KEPT_REGISTERS if facts.spec.dropout is not None else 0
    # beside an element of each pair, one of each key takes as many registers again, and another of each pair twice as many
    pairs = len(needs.pair_gathers(facts.spec))
    beside = needs.PAIR_ELEMENT_REGISTERS * (2 * (pairs - 1) + bool(facts.staged.keys)) if pairs else 0
    return output + scores + scores // 2 + needs.OTHER_REGISTERS + needs.captured_registers(facts) + beside + dropped


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    return Cost(aligned(*buffers(facts, tile)), Estimated(registers(facts, tile), SCORER_REGISTERS))


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*PREFERRED, *POSSIBLE), lambda t: cost(facts, t))


def choices(facts: SpecFacts, arch: Arch, tile: Tile) -> WidePlan:
    spec = facts.spec
    lanes_load = facts.bounds.per_tile or bool(facts.staged.keys)
    output, output_slabs, weight_stages = next(out for out in outputs(spec) if _fits(facts, arch, tile, *out))
    return WidePlan(
        consumers=CONSUMERS,
        producer_registers=PRODUCER_REGISTERS,
        consumer_registers=SCORER_REGISTERS,
        q_in_registers=False,
        output=output,
        output_slabs=output_slabs,
        row_sums=hopper.sums_of_threads(facts),
        shift=facts.shift,
        per_consumer_range=False,
        from_first_tile=hopper.from_first_tile(facts),
        adaptive_threshold=hopper.adapts_slack(facts),
        values_after_queries=True,
        warp_loads_keys=lanes_load,
        warps_release=lanes_load,
        pair_slots=0,
        value_slabs=value_slabs(spec),
        key_parts=key_parts(spec),
        value_parts=value_parts(spec, tile),
        weight_stages=weight_stages,
    )


def outputs(spec: AttentionSpec) -> Iterator[tuple[Output, int, int]]:
    """Where O may lie, how many of its slabs a warp has there, and how many tiles of weights are beside it: the preferred ones
    first. Over Q, whose slabs the consumers share, there must be room for all slabs."""
    most, of_q = most_slabs(spec), slabs(spec.head_dim) // CONSUMERS
    for stages in (2, 1):
        yield from (("beside", n, stages) for n in dict.fromkeys((most, 1)))
    if most <= of_q:
        yield from (("over", most, stages) for stages in (2, 1))


def _fits(facts: SpecFacts, arch: Arch, tile: Tile, output: Output, output_slabs: int, weight_stages: int) -> bool:
    return aligned(*buffers(facts, tile, output, output_slabs, weight_stages)) <= arch.shared_per_block


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    wgmma.refuse(facts, arch, "hopper", facts.cost_beside_terms)
    spec = facts.spec
    tile = pick_tile(spec, arch, PREFERRED, POSSIBLE, lambda t: cost(facts, t))
    own, affine = choices(facts, arch, tile), hopper.added_once(facts)
    staged = replace(facts.staged, terms=facts.row_terms)
    every_registers = f"{PRODUCER_REGISTERS}, {SCORER_REGISTERS} and {FOLLOWER_REGISTERS} a thread"
    why_registers = f"{WHY_REGISTERS}: half of O, S and P take about {registers(facts, tile)}"
    what = f"{spec.dtype.name} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"
    decisions = (
        Decision("schedule", "hopper", what),
        *score_decisions(facts),
        *maximum_decisions(facts),
        *hopper.affine_decisions(affine),
        Decision("warpgroups", f"1 + {CONSUMERS}", WHY_GROUPS),
        tile_decision(spec, tile, WHY_TILE),
        Decision("stages", str(tile.stages), "later tiles are copied in parts while one is used"),
        Decision("registers", every_registers, why_registers),
        *decided(own, facts),
        Decision("blocks", "one for each SM", hopper.WHY_PERSISTENT),
        Decision("swizzle", "128 bytes", wgmma.WHY_SLABS),
        *hopper.staging_decisions(staged, 0),
    )
    made = buffers(facts, tile, own.output, own.output_slabs, own.weight_stages)
    return planned(schedule, facts, arch, tile, decisions, made, own, staged=staged, affine=affine)


WHY_GROUPS = (
    "one copies; O of 64 rows is too wide for the registers of one: two have half of its columns each, and the first of them "
    "computes the weights for both"
)
WHY_REGISTERS = "of the producer, the first and the second consumer, which has half of O alone"
WHY_TILE = "the first preferred tile whose half of O, S and P fit a consumer's registers, and which fits shared memory beside Q"
