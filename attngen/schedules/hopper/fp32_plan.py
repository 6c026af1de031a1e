"""The plan of the Hopper schedule for fp32: each number is a sum of three of bf16, which wgmma multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from attngen.plan.arch import Arch
from attngen.plan.choices import choice, decided
from attngen.plan.code_size import INLINED_UP_TO
from attngen.plan.decisions import maximum_decisions, score_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule, refusal
from attngen.plan.room import Estimated
from attngen.plan.shared_memory import WORK_TILE, SharedBuffer, aligned
from attngen.plan.terms import PRODUCTS, TERMS
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.schedules.hopper import needs
from attngen.schedules.hopper import plan as hopper
from attngen.schedules.hopper import tiles as hopper_tiles
from attngen.schedules.hopper.choices import HopperPlan
from attngen.schedules.hopper.fp8_plan import is_simple
from attngen.schedules.hopper.tiles import consumers
from attngen.schedules.parts.wgmma import NEEDED, WARPGROUP_ROWS, WHY_SLABS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import BF16, FP32

WIDEST = 128  # elements of a head: terms of wider ones, beside those of Q, leave no room for a tile of 64 keys
OUTPUT_SLAB = 32  # columns of fp32 in a row of 128 bytes
# Registers of a producer's and of a consumer's thread. With the fewest, a producer only copies, tiles of one stage
REGISTERS, STAGING_REGISTERS, FEWEST = (40, 232), (56, 224), (24, 240)
# Estimates: addresses, sizes, loop counters, exponents in flight
OTHER_REGISTERS, OTHER_IN_TURN = 32, 24
SCORE_REGISTERS = 12  # for scores that are computed, and masks of pairs

PREFERRED: dict[int, tuple[Tile, ...]] = {
    64: (hopper_tiles.tile(2, 96, 2), hopper_tiles.tile(2, 64, 2)),
    128: (hopper_tiles.tile(2, 64, 1), hopper_tiles.tile(2, 32, 1)),
}
POSSIBLE = tuple(hopper_tiles.tile(2, kv, s) for kv in (128, 96, 64, 48, 32) for s in (4, 3, 2, 1))

Step = Literal["beside_scores", "in_turn"]  # `templates/parts/hopper/step_NAME.cuh.j2`


def types(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """What a spec must have beside its tensors' types."""
    if {*spec.dtypes.values()} != {FP32}:
        yield "dtype", "its products are of numbers of fp32, in three terms each: Q, K, V and O have this type"
    if spec.v_scale is not None:
        yield "scaled v", "it multiplies no weights by a scale of V"
    if spec.rotary is not None:
        yield "rotary", "its rows of fp32 are not rotated before they are split"


def why_not(facts: SpecFacts, arch: Arch) -> str:
    """Why it cannot compute the spec on `arch`; empty if it can."""
    if not arch.has(*NEEDED):
        return "it needs TMA and wgmma"
    if facts.spec.kernel.storage != "dense":
        return "its rows of fp32 are split before, and only dense ones are"
    if facts.spec.normalize == "none":  # measured: 2.3 to 2.8 times the error of torch in fp32, 4096 keys of retention
        return "its sums are cut off towards 0, and without normalization this is more than the rounding of fp32"
    if not any(cost(facts, t).fits(arch, 32 * t.warps) for t in (*preferred_tiles(facts), *POSSIBLE)):  # mostly the first
        return "a thread has no registers for its O, scores and weights, and what the mask and the score read"
    if facts.cost_beside_terms > INLINED_UP_TO:
        return f"it computes at most {INLINED_UP_TO} additions for each pair: code between its products is inlined"
    return ""


def refuse(facts: SpecFacts, arch: Arch) -> None:
    """Raise PlanRefusal if it cannot compute the spec on `arch`."""
    if reason := why_not(facts, arch):
        raise refusal("kernel", f"kernel hopper of {facts.spec.dtype} on {arch.name}", reason, "use kernel fused")


def _output(own: Fp32Plan, facts: SpecFacts) -> tuple[str, str]:
    return (
        f"{own.output_slabs} of {output_slabs(facts.spec)} slabs a warp",
        f"of {OUTPUT_SLAB} columns; TMA copies them to global memory in the background",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Plan(HopperPlan):
    """Warp specialization, with products of three terms a number, whose sums over keys are added to O after each tile."""

    q_in_registers: bool = choice("Q", {False: ("in shared memory", "three terms of its fragments would fill the registers")})
    replaces_output: bool = choice(
        "P V",
        {
            False: (
                "added to O in fp32, tile by tile",
                "the tensor cores cut off sums: over many tiles, errors of one sign would add up",
            )
        },
    )
    output_slabs: int = choice("O in shared memory", _output)
    step: Step = choice(
        "products",
        {
            "beside_scores": (
                "P V beside Q K^T of the next tile",
                "registers hold the sums of both: threads compute weights under P V",
            ),
            "in_turn": (
                "one after the other",
                "registers have no room for the sums of both: consumers compute weights in turn",
            ),
        },
    )
    products: Literal["whole"] = "whole"  # `templates/parts/hopper_fp32/products_NAME.cuh.j2`


def output_slabs(spec: AttentionSpec) -> int:
    """Slabs of a row of O."""
    return -(-spec.head_dim_v // OUTPUT_SLAB)


def buffers(facts: SpecFacts, tile: Tile, out: int = 1) -> tuple[SharedBuffer, ...]:
    spec, own = facts.spec, facts.staged
    kv, stages, groups = tile.block_kv, tile.stages, consumers(tile)
    d, dv, t = slabs(spec.head_dim), slabs(spec.head_dim_v), BF16.name
    of_tiles = f"of {stages} tile{'s' if stages > 1 else ''}, in three terms each"
    mbarriers = 2 + 2 * groups + 4 * stages * TERMS
    rows = SharedBuffer(
        name="O", element="float", shape=(4 * groups, out, 16, OUTPUT_SLAB), use=needs.OUTPUT_ROWS, swizzled=True
    )

    def words(name: str, shape: tuple[int, ...], use: str, element: str = "int") -> SharedBuffer:
        return SharedBuffer(name=name, element=element, shape=shape, use=use)

    return (
        slab_tiles("Q", t, (groups, TERMS * d, WARPGROUP_ROWS), "the query rows of each consumer, in three terms each"),
        slab_tiles("K", t, (stages, TERMS, d, kv), f"the keys {of_tiles}"),
        slab_tiles("V", t, (stages, TERMS, dv, kv), f"the values {of_tiles}"),
        rows,
        words("BARRIERS", (mbarriers,), "see the kernel", "mbarrier"),
        words("WORK_TILES", (2, len(WORK_TILE)), "which rows and head " + needs.WHOSE[False]),
        *([needs.visits(stages)] if facts.bounds.per_tile else []),
        *([own.buffer(kv, stages + 1)] if own.keys else []),
    )


def registers(facts: SpecFacts, tile: Tile, step: Step) -> int:
    """Registers that a consumer's thread needs: O, P V of a tile, scores, three terms of weights, and the rest. One after the
    other, products are where scores were."""
    output, scores, weights = facts.spec.head_dim_v // 2, tile.block_kv // 2, TERMS * tile.block_kv // 4
    dropped = needs.KEPT_REGISTERS + tile.block_kv // 8 if facts.spec.dropout is not None else 0
    beside = step == "beside_scores"
    sums, other = (output + scores, OTHER_REGISTERS) if beside else (max(output, scores), OTHER_IN_TURN)
    more = 0 if is_simple(facts) else SCORE_REGISTERS + needs.captured_registers(facts)
    return output + sums + weights + other + dropped + more


def splits(facts: SpecFacts, tile: Tile) -> tuple[tuple[int, int], ...]:
    """Registers of a producer's and of a consumer's thread: the possible ones, the preferred first."""
    if facts.staged.keys or facts.bounds.per_tile:
        return (STAGING_REGISTERS,)
    return (REGISTERS, FEWEST) if tile.stages == 1 and is_simple(facts) else (REGISTERS,)


def form(facts: SpecFacts, tile: Tile) -> tuple[Step, tuple[int, int]]:
    """What is under way at once, and the registers of both kinds of threads: products of two tiles, if there is room for the
    sums of both."""
    possible: tuple[tuple[Step, tuple[int, int]], ...] = (
        *(("beside_scores", split) for split in splits(facts, tile)),
        ("in_turn", splits(facts, tile)[0]),
    )
    return next((one for one in possible if registers(facts, tile, one[0]) <= one[1][1]), possible[-1])


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    step, (_, consumer) = form(facts, tile)
    return Cost(aligned(*buffers(facts, tile)), Estimated(registers(facts, tile, step), consumer))


def preferred_tiles(facts: SpecFacts) -> tuple[Tile, ...]:
    """The tiles to try, the fastest first."""
    return hopper.of_head_size(facts.spec, PREFERRED)


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(facts), *POSSIBLE), lambda t: cost(facts, t))


def choices(facts: SpecFacts, arch: Arch, tile: Tile) -> Fp32Plan:
    step, (producer, consumer) = form(facts, tile)
    lanes_load = facts.bounds.per_tile or bool(facts.staged.keys)
    every = output_slabs(facts.spec)
    parts = (n for n in range(every, 0, -1) if every % n == 0)
    return Fp32Plan(
        consumers=consumers(tile),
        producer_registers=producer,
        consumer_registers=consumer,
        output_slabs=next(n for n in parts if aligned(*buffers(facts, tile, n)) <= arch.shared_per_block or n == 1),
        row_sums="weights",
        shift=None,
        q_in_registers=False,
        per_consumer_range=False,
        from_first_tile=hopper.from_first_tile(facts),
        adaptive_threshold=False,
        beside_last=hopper.beside_last(facts, holds_q=False, per_consumer=False),
        replaces_output=False,
        values_after_queries=True,
        warp_loads_keys=lanes_load,
        warps_release=lanes_load,
        pair_slots=0,
        step=step,
    )


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    refuse(facts, arch)
    spec = facts.spec
    tile = pick_tile(spec, arch, preferred_tiles(facts), POSSIBLE, lambda t: cost(facts, t))
    own = choices(facts, arch, tile)
    why_registers = (
        f"copying needs few; about {registers(facts, tile, own.step)} hold O, what a tile adds to it, S, and three terms of P"
    )
    decisions = (
        Decision("schedule", "hopper", f"{spec.dtype} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"),
        Decision("Q, K, V and P", f"in {TERMS} terms of {BF16}", WHY_TERMS),
        *score_decisions(facts),
        *maximum_decisions(facts),
        Decision("warpgroups", f"1 + {own.consumers}", f"one copies; {own.consumers} {hopper.WHY_GROUPS}"),
        tile_decision(spec, tile, WHY_TILE),
        Decision("stages", str(tile.stages), "of tiles in parts: a term is copied and multiplied for itself"),
        Decision("registers", f"{own.producer_registers} and {own.consumer_registers} a thread", why_registers),
        *decided(own, facts),
        Decision("blocks", "one for each SM", hopper.WHY_PERSISTENT),
        Decision("swizzle", "128 bytes", WHY_SLABS),
        *hopper.staging_decisions(facts.staged, 0),
    )
    staged = replace(facts.staged, terms=facts.row_terms)
    made = buffers(facts, tile, own.output_slabs)
    return planned(schedule, facts, arch, tile, decisions, made, own, in_terms=("Q", "K", "V"), staged=staged)


WHY_TERMS = (
    f"together they have the 24 bits of fp32; of nine products of two numbers' terms {PRODUCTS} are computed, the others "
    "are less than a rounding error"
)
WHY_TILE = "the first preferred tile whose terms fit shared memory beside those of Q, and whose sums fit a consumer's registers"
