"""The plan of the Hopper schedule for products of 8 bits: Q, K and V, and the weights too."""

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
from attngen.plan.prepared import scales_keys
from attngen.plan.room import Estimated
from attngen.plan.shared_memory import COLUMN, WORK_TILE, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.schedules.hopper import needs
from attngen.schedules.hopper import plan as hopper
from attngen.schedules.hopper import tiles as hopper_tiles
from attngen.schedules.hopper.choices import HopperPlan
from attngen.schedules.hopper.tiles import consumers
from attngen.schedules.parts.wgmma import NEEDED, SWIZZLE_ATOM, WARPGROUP_ROWS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.dtypes import BF16, FP8_E4M3, FP16
from attngen.spec.expr import Apply, Expr, names_in
from attngen.spec.operator import ZERO

WEIGHT_EXPONENT = 8.0  # weights are multiplied by 2 to it: e4m3 has 448 as its largest number, and 2^-9 as its least
RESCALE_EXPONENT = 0.8  # exponents may exceed it by so much before a maximum is raised: 2^8.8 is 446
ROW_BYTES = 128  # bytes of a row of a slab
HEAD_MULTIPLE = 16  # bytes of a copy
WHOLE_COLUMNS = 128  # columns of V, at most, whose products registers may have room for beside O and scores
PART_COLUMNS = 64  # columns of a part, at most
REGISTERS = {2: (24, 240), 3: (32, 160)}  # as `needs.REGISTERS`, of a producer that only copies
SCORE_REGISTERS = 12  # for scores that are computed, and masks of pairs
# Estimates: addresses, sizes, loop counters, exponents in flight
OTHER_REGISTERS, OTHER_IN_PARTS = 22, 32

PREFERRED: dict[int, tuple[Tile, ...]] = {
    64: (hopper_tiles.tile(3, 128, 3), hopper_tiles.tile(2, 128, 3)),
    128: (hopper_tiles.tile(2, 128, 3), hopper_tiles.tile(2, 128, 2)),
    256: (hopper_tiles.tile(2, 128, 2), hopper_tiles.tile(2, 64, 4), hopper_tiles.tile(2, 64, 3), hopper_tiles.tile(2, 64, 2)),
}
POSSIBLE = tuple(hopper_tiles.tile(c, kv, s) for c in (3, 2) for kv in (128, 64) for s in (4, 3, 2))


def types(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """What a spec must have beside its tensors' types: weights are numbers of 8 bits."""
    q, k, v, o = spec.dtypes.values()
    if {q, k, v} != {FP8_E4M3}:
        yield "dtype", "its products are of e4m3 alone: Q, K and V have this type"
    if o not in (BF16, FP16):
        yield "dtype", "its O is bf16 or fp16"
    if spec.head_dim % HEAD_MULTIPLE or spec.head_dim_v % HEAD_MULTIPLE:
        yield "head_dim", f"its heads of 8 bits have multiples of {HEAD_MULTIPLE} elements"
    if spec.normalize != "softmax":
        yield "normalize", "its weights are numbers of e4m3, whose range those of a softmax fit: at most 1 in each row"
    if scales_keys(spec):
        yield "scaled v", "weights times scales of V that differ from key to key exceed the range of e4m3"
    if spec.dropout is not None:
        yield "dropout", "its weights of 8 bits are not dropped"
    if spec.rotary is not None:
        yield "rotary", "its rows of 8 bits are not rotated"


def why_not(facts: SpecFacts, arch: Arch) -> str:
    """Why it cannot compute the spec on `arch`; empty if it can."""
    if not arch.has(*NEEDED):
        return "it needs TMA and wgmma"
    if facts.spec.kernel.is_paged:
        return "its values of 8 bits are transposed before, and lie in no pages"
    if not tiles(facts, arch):
        return "a thread has no registers for its O, scores and weights, and what the mask and the score read"
    if facts.pair_cost > INLINED_UP_TO:
        return f"it computes at most {INLINED_UP_TO} additions for each pair: code between its products is inlined"
    return ""


def refuse(facts: SpecFacts, arch: Arch) -> None:
    """Raise PlanRefusal if it cannot compute the spec on `arch`."""
    if reason := why_not(facts, arch):
        raise refusal("kernel", f"kernel hopper of {facts.spec.dtype} on {arch.name}", reason, "use kernel tiled")


Products = Literal["whole", "in_parts"]  # `templates/parts/hopper_fp8/products_NAME.cuh.j2`, `step_NAME.cuh.j2`
WHY_PARTS = "the registers have no room for all of them beside O"


def _output(own: Fp8Plan, facts: SpecFacts) -> tuple[str, str]:
    every = slabs(facts.spec.head_dim_v)
    return (
        f"{own.output_slabs} of {every} slabs a warp",
        "of 64 columns; TMA copies them to global memory in the background",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Plan(HopperPlan):
    """Warp specialization, with products of 8 bits, whose sums over keys are added to O in fp32 after each tile."""

    q_in_registers: bool = choice(
        "Q", {False: ("in shared memory", "O, and the products of a tile that are to be added to it, fill the registers")}
    )
    replaces_output: bool = choice(
        "P V",
        {
            False: (
                "added to O in fp32, tile by tile",
                "the sums of wgmma of 8 bits keep some 14 bits: over many tiles they would lose what a tile adds",
            )
        },
    )
    output_slabs: int = choice("O in shared memory", _output)
    # those of P V: of all columns at once, or of some after the others
    products: Products = choice("products of P V", {"in_parts": ("in parts of the columns", WHY_PARTS)})
    part_columns: int  # columns of V that are multiplied at once

    @property
    def step(self) -> str:
        """What is under way beside P V: `templates/parts/hopper/step_NAME.cuh.j2`."""
        return "beside_scores" if self.products == "whole" else "in_turn"


def buffers(facts: SpecFacts, tile: Tile, output_slabs: int = 1) -> tuple[SharedBuffer, ...]:
    spec = facts.spec
    t, kv, stages, groups = spec.dtype.name, tile.block_kv, tile.stages, consumers(tile)
    d, own = byte_slabs(spec.head_dim), facts.staged
    rotates = needs.own_tiles(facts, tile)

    def words(name: str, shape: tuple[int, ...], use: str, element: str = "int") -> SharedBuffer:
        return SharedBuffer(name=name, element=element, shape=shape, use=use)

    return (
        _tiles("Q", t, (groups, d, WARPGROUP_ROWS), "the query rows of each consumer"),
        _tiles("K", t, (stages, d, kv), f"the keys of {stages} tiles"),
        _tiles("V", t, (stages, spec.head_dim_v * kv // ROW_BYTES), f"the values of {stages} tiles, transposed"),
        slab_tiles("O", spec.dtypes["o"].name, (4 * groups, output_slabs, 16), needs.OUTPUT_ROWS, read=None),
        words("BARRIERS", (2 + 2 * groups + 4 * stages,), "see the kernel", "mbarrier"),
        words("WORK_TILES", (2, len(WORK_TILE) + rotates), "which rows and head " + needs.WHOSE[False]),
        *([needs.visits(stages)] if facts.bounds.per_tile else []),
        *([own.buffer(kv, stages + 1)] if own.keys else []),
    )


def byte_slabs(head_dim: int) -> int:
    """Slabs of ROW_BYTES columns that hold a head; zeros fill the last one."""
    return -(-head_dim // ROW_BYTES)


def _tiles(name: str, dtype: str, extents: tuple[int, ...], use: str) -> SharedBuffer:
    """Tiles in slabs of rows of ROW_BYTES, swizzled as TMA and wgmma have them."""
    buffer = SharedBuffer(name=name, element=dtype, shape=(*extents, ROW_BYTES), use=use, swizzled=True, read=COLUMN)
    assert buffer.bytes % SWIZZLE_ATOM == 0, buffer
    return buffer


def registers(facts: SpecFacts, tile: Tile, columns: int) -> int:
    """Registers that a consumer's thread needs: O, products of P V of so many columns, scores, weights, and the rest. In parts,
    the products of two are where scores were."""
    output, scores, weights = facts.spec.head_dim_v // 2, tile.block_kv // 2, tile.block_kv // 8
    if columns == facts.spec.head_dim_v:
        needed = output + output + scores + weights + OTHER_REGISTERS
    else:
        needed = output + weights + max(scores, columns) + OTHER_IN_PARTS
    if is_simple(facts):
        return needed
    return needed + SCORE_REGISTERS + needs.captured_registers(facts)


def is_simple(facts: SpecFacts) -> bool:
    """Whether pairs are scores as they are, or scaled, under a mask that bounds keys from above alone, without a sink."""
    spec, bounds = facts.spec, facts.bounds
    return is_scaled(spec.score) and not bounds.per_tile and bounds.begin is ZERO and spec.sink is None


def is_scaled(score: Expr) -> bool:
    """Whether a score is `s`, or `s` times a number that all pairs of a head share, such as a scale of K."""
    if score == S:
        return True
    factors = score.args if isinstance(score, Apply) and score.op == "mul" else ()
    return S in factors and not {"q", "k"} & names_in(score)


def part_columns(facts: SpecFacts, tile: Tile) -> int:
    """The columns of V that are multiplied at once: all, if registers have room for them, or the largest part that they have
    room for."""
    size, most = facts.spec.head_dim_v, register_split(facts, tile)[1]
    together = size * tile.block_kv // ROW_BYTES  # columns that no other column is beside in a row of transposed values
    parts = [n for n in range(PART_COLUMNS, 0, -8) if together % n == 0 and n < size] or [size]
    whole = [size] if size <= WHOLE_COLUMNS else []
    return next((n for n in (*whole, *parts) if registers(facts, tile, n) <= most), parts[-1])


def register_split(facts: SpecFacts, tile: Tile) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread."""
    if facts.staged.keys:
        return needs.STAGING_REGISTERS[consumers(tile)]
    return (REGISTERS if is_simple(facts) else needs.REGISTERS)[consumers(tile)]


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    needed = registers(facts, tile, part_columns(facts, tile))
    return Cost(aligned(*buffers(facts, tile)), Estimated(needed, register_split(facts, tile)[1]))


def preferred_tiles(facts: SpecFacts) -> tuple[Tile, ...]:
    """The tiles to try, the fastest first. Wide heads whose masks or scores take registers have tiles of few keys."""
    usual = hopper.of_head_size(facts.spec, PREFERRED)
    return usual if is_simple(facts) else tuple(t for t in usual if t.block_kv < ROW_BYTES) or usual


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(facts), *POSSIBLE), lambda t: cost(facts, t))


def choices(facts: SpecFacts, arch: Arch, tile: Tile) -> Fp8Plan:
    per_consumer, columns = needs.own_tiles(facts, tile), part_columns(facts, tile)
    producer, consumer = register_split(facts, tile)
    lanes_load = facts.bounds.per_tile or bool(facts.staged.keys)
    every = slabs(facts.spec.head_dim_v)
    parts = (n for n in range(every, 0, -1) if every % n == 0)
    return Fp8Plan(
        consumers=consumers(tile),
        producer_registers=producer,
        consumer_registers=consumer,
        q_in_registers=False,
        output_slabs=next(n for n in parts if aligned(*buffers(facts, tile, n)) <= arch.shared_per_block or n == 1),
        row_sums="weights",
        shift=None,
        per_consumer_range=per_consumer,
        from_first_tile=hopper.from_first_tile(facts),
        adaptive_threshold=False,
        beside_last=hopper.beside_last(facts, holds_q=False, per_consumer=per_consumer),
        replaces_output=False,
        values_after_queries=consumers(tile) == 2,
        warp_loads_keys=lanes_load,
        warps_release=lanes_load or per_consumer,
        pair_slots=0,
        products="whole" if columns == facts.spec.head_dim_v else "in_parts",
        part_columns=columns,
    )


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    refuse(facts, arch)
    spec = facts.spec
    tile = pick_tile(spec, arch, preferred_tiles(facts), POSSIBLE, lambda t: cost(facts, t))
    own, affine = choices(facts, arch, tile), hopper.added_once(facts)
    why_registers = (
        f"copying needs few; about {registers(facts, tile, own.part_columns)} hold O, what a tile adds to it, S and P"
    )
    staged = replace(facts.staged, terms=facts.row_terms)
    decisions = (
        Decision("schedule", "hopper", f"{spec.dtype} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"),
        Decision("weights", f"in {FP8_E4M3}, times 2^{WEIGHT_EXPONENT:.0f}", WHY_WEIGHTS),
        Decision("V", "transposed, by a kernel before the others", WHY_TRANSPOSED),
        *score_decisions(facts),
        *maximum_decisions(facts),
        *hopper.affine_decisions(affine),
        Decision("warpgroups", f"1 + {own.consumers}", f"one copies; {own.consumers} {hopper.WHY_GROUPS}"),
        tile_decision(spec, tile, hopper.WHY_TILE),
        Decision("stages", str(tile.stages), "later tiles are copied while one is used"),
        Decision("registers", f"{own.producer_registers} and {own.consumer_registers} a thread", why_registers),
        *decided(own, facts),
        Decision("blocks", "one for each SM", hopper.WHY_PERSISTENT),
        Decision("swizzle", "128 bytes", WHY_SLABS),
        *hopper.staging_decisions(staged, 0),
    )
    more = {"consumer_rows": WARPGROUP_ROWS if own.per_consumer_range else 0, "staged": staged, "affine": affine}
    made = buffers(facts, tile, own.output_slabs)
    return planned(schedule, facts, arch, tile, decisions, made, own, transposed=("V",), **more)


WHY_WEIGHTS = "the products of P V are of 8 bits too; the largest weight of a row, 1, becomes 256 of at most 448"
WHY_TRANSPOSED = "wgmma reads operands of 8 bits along the sum alone, and P V sums over keys"
WHY_SLABS = (
    "Q, K and V in slabs of rows of 128 bytes, their chunks of 16 bytes permuted, so that neither TMA nor wgmma meets a bank "
    "conflict"
)
