"""The fused schedule on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async; fp16, bf16, split fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.diagnostics import counted
from attngen.plan.arch import Arch
from attngen.plan.captured_staging import pair_elements
from attngen.plan.choices import choice, decided
from attngen.plan.decisions import row_term_decisions, score_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule, origin_of, refusal
from attngen.plan.register_table import Family
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.plan.variants import of_pairs, reads_pairs
from attngen.schedules.fused_mma import needs
from attngen.schedules.fused_mma.registers import may_hold_q, room, variant
from attngen.schedules.parts import mma, tile_of_block
from attngen.schedules.parts.mma import MMA_ROWS, chunk, operands, padded_head_dim, q_registers
from attngen.schedules.parts.tile_of_block import is_shared, width
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Gather, walk
from attngen.spec.print_attn import expression_to_text

BLOCKS = 2  # per SM, if tiles of ROOMY_ROWS allow it: one computes softmax while the other multiplies
ROOMY_ROWS = 64
# Two row blocks a warp read each fragment of K and V once for 32 rows: shared memory is what 16 rows a warp wait for.
PREFERRED = tuple(
    Tile(q, kv, stages, warps)
    for q, kv, warps in ((128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 32, 4), (32, 32, 2), (16, 16, 1))
    for stages in (2, 1)
)
# Split operands need twice the registers: 16 rows a warp leave room for tiles of 64 keys.
PREFERRED_SPLIT = tuple(Tile(q, kv, 1, q // 16) for q, kv in ((64, 64), (64, 32), (64, 16), (32, 16), (16, 16)))
# 32 rows a warp where the operands' registers are few and no row has less to do than others.
PREFERRED_SPLIT_FULL = (Tile(128, 32, 1, 4),)
# Masks of queries' or keys' elements allow parts of many tiles: fewer rows waste less of them. 128 are for masks that
# compare a key's element with a row's, which shared memory hands on.
PREFERRED_FOR_DATA = (Tile(64, 64, 2, 2), Tile(128, 64, 1, 4), Tile(64, 64, 1, 2), Tile(64, 32, 2, 2), Tile(64, 32, 1, 2))
# Masks and scores that read an element for each pair hold as many: 16 rows a warp.
PREFERRED_FOR_PAIRS = tuple(Tile(q, kv, 2, q // 16) for q, kv in ((64, 32), (32, 32)))
POSSIBLE = tuple(
    Tile(q, kv, stages, q // rows)
    for rows in (32, 16)
    for q in (256, 128, 64, 32, 16)
    if q >= rows
    for kv in (128, 64, 32, 16)
    for stages in (1, 2)
)
# Where the warps of a block share its tiles. Many rows read keys less often; split operands need registers for them
PREFERRED_SHARED = tuple(
    Tile(q, kv, 1, warps) for q, kv, warps in ((64, 64, 8), (64, 32, 8), (32, 32, 4), (32, 16, 4), (16, 32, 4), (16, 16, 4))
)
PREFERRED_SHARED_SPLIT = tuple(Tile(q, 16, 1, 8) for q in (32, 16))
POSSIBLE_SHARED = tuple(
    Tile(q, kv, stages, warps)
    for q, warps in ((64, 8), (32, 8), (32, 4), (16, 8), (16, 4))
    for kv in (64, 32, 16)
    for stages in (1, 2)
)
WARPS_HAVE: dict[mma.WarpsHave, str] = {
    "rows": "{rows} rows each: no warp needs the scores of another{shared}",
    "columns": tile_of_block.WHY_COLUMNS,
}
WEIGHING = {"softmax": "the softmax and ", "sigmoid": "the sigmoid and ", "none": ""}  # what comes before P V
WHY_BETWEEN = "issued when the first products of a tile are queued: the tensor cores work while addresses are computed"
WHY_SUMMED = "added to O in fp32: the tensor cores truncate sums, and errors of one sign add up"
WHY_BLOCKS = "the compiler may use the registers of so many: split operands need all that a thread can have"
BETWEEN_UP_TO = 128  # head size: by measurement, wider ones are not faster with copies between products
WHY_KEYS = "read once for each key of a partial tile, during Q K^T, instead of by every thread that has the key"
WHY_PAIRS = "a load of 4 bytes before Q K^T, in full tiles, if rows begin at multiples of 4 bytes; else each pair reads its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMmaPlan(mma.MmaPlan):
    # copies of a tile; else before the products
    copies_between_steps: bool = choice("copies", {True: ("between products", WHY_BETWEEN)})
    idle_copiers: bool = choice("copying threads", needs.WHY_IDLE)  # some threads copy nothing
    one_stage_because: str  # why there is one stage, if the reason is that there is no room for two


def why_not(facts: SpecFacts, arch: Arch) -> str:
    if reason := mma.lacks(facts.spec, arch):
        return reason
    if is_shared(facts.spec):
        least = preferred_tiles(facts)[-1]
        lacking = cost(facts, arch, least).why_not(arch, 32 * least.warps)
        return lacking and f"its smallest tile {lacking}"
    return ""


def cost(facts: SpecFacts, arch: Arch, tile: Tile) -> Cost:
    registers = room(facts, arch, tile, facts.spec.kernel.q == "registers")
    return Cost(needs.shared_bytes(facts, tile), registers, threads=needs.copiers(facts.spec, tile))


def blocks_told(facts: SpecFacts, arch: Arch, tile: Tile) -> int:
    """The blocks per SM that the launch bounds state; 0: none. Split operands are fastest with all registers of a thread, which
    the compiler does not use otherwise."""
    return max(1, needs.blocks_of_an_sm(facts, arch, tile)) if operands(facts.spec).split else 0


def is_roomy(facts: SpecFacts, arch: Arch, tile: Tile) -> bool:
    """Whether BLOCKS blocks fit an SM; with two stages, with a fifth of its shared memory to spare. Split operands need all the
    registers of a thread."""
    if operands(facts.spec).split:
        return True
    shared = BLOCKS * (needs.shared_bytes(facts, tile) + arch.shared_reserved)
    return needs.blocks_of_an_sm(facts, arch, tile) >= BLOCKS and (tile.stages == 1 or 5 * shared <= 4 * arch.shared_per_sm)


def preferred_tiles(facts: SpecFacts) -> tuple[Tile, ...]:
    """The tiles to try, the fastest first, as measured by `attngen tune`."""
    spec = facts.spec
    if is_shared(spec):
        return PREFERRED_SHARED_SPLIT if operands(spec).split else PREFERRED_SHARED
    if not operands(spec).split:
        if reads_pairs(spec):
            return (*PREFERRED_FOR_PAIRS, *PREFERRED)
        from_data = spec.mask is not None and any(isinstance(node, Gather) and of_pairs(node) for node in walk(spec.mask))
        for_data = [t for t in PREFERRED_FOR_DATA if t.block_q <= ROOMY_ROWS or needs.staged_of(facts, t).rows]
        return (*for_data, *PREFERRED) if from_data else PREFERRED
    full = operands(spec).split == "bf16" and spec.mask is None
    return (*PREFERRED_SPLIT_FULL, *PREFERRED_SPLIT) if full else PREFERRED_SPLIT


def one_stage_because(facts: SpecFacts, arch: Arch, tile: Tile) -> str:
    """Why there is no room for two stages; empty if there are two, or if room is not the reason."""
    two = replace(tile, stages=2)
    if tile.stages == 2:
        return ""
    if needs.shared_bytes(facts, two) > arch.shared_per_block:
        return "two of each do not fit shared memory"
    fewer = needs.blocks_of_an_sm(facts, arch, two) < needs.blocks_of_an_sm(facts, arch, tile)
    return "two of each would take the room of another block on the same multiprocessor" if fewer else ""


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The tiles that fit and give an SM at least four warps, one for each of its schedulers."""
    fit = fitting(arch, (*preferred_tiles(facts), *possible_tiles(facts)), lambda t: cost(facts, arch, t))
    return tuple(t for t in fit if t.warps * needs.blocks_of_an_sm(facts, arch, t) >= 4)


def possible_tiles(facts: SpecFacts) -> tuple[Tile, ...]:
    """The tiles that may be stated."""
    return POSSIBLE_SHARED if is_shared(facts.spec) else POSSIBLE


def copies_between_steps(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether copies are issued between the steps of products instead of before them: if there are enough steps, a warp has two
    row blocks, and it is not slower."""
    steps, last = padded_head_dim(spec) // MMA_ROWS, tile.block_kv // MMA_ROWS
    narrow = max(spec.head_dim, spec.head_dim_v) <= BETWEEN_UP_TO
    return steps >= 3 and last >= 2 and needs.row_blocks(tile) == 2 and narrow and not operands(spec).split


def idle_copiers(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether some threads copy nothing: the chunks of a row of 16-bit numbers do not divide the number of threads."""
    widths = (padded_head_dim(spec), width(spec, tile))
    return not operands(spec).split and any(32 * tile.warps % (width // chunk(spec)) for width in widths)


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec = facts.spec
    if reason := why_not(facts, arch):  # a wide head, which the next schedule under the keyword does not have either
        raise refusal("kernel", f"kernel fused on {arch.name}", reason, "use kernel tiled")
    preferred = preferred_tiles(facts)
    roomy = [t for t in preferred if t.block_q >= ROOMY_ROWS and is_roomy(facts, arch, t)]
    tile = pick_tile(spec, arch, (*roomy, *preferred), possible_tiles(facts), lambda t: cost(facts, arch, t))
    fastest = "the fastest measured tile " + (
        "of which" if tile in roomy and not operands(spec).split else "that fits registers and shared memory;"
    )
    holds = spec.kernel.q != "shared" and may_hold_q(facts, arch, tile)
    return with_tile(schedule, facts, arch, tile, holds, fastest)


def with_tile(schedule: Schedule, facts: SpecFacts, arch: Arch, tile: Tile, holds: bool, why: str = "") -> Plan:
    """The plan of a tile that fits; `holds`: Q stays in registers."""
    spec, stages = facts.spec, tile.stages
    have: mma.WarpsHave = "columns" if is_shared(spec) else "rows"
    pairs = pair_elements(spec).pairs if have == "rows" else ()  # a thread reads those of its own rows
    staged = replace(needs.staged_of(facts, tile), pairs=pairs, terms=facts.row_terms)
    numbers = operands(spec)
    pad, t = chunk(spec), spec.dtype.name
    between = copies_between_steps(spec, tile)
    beside = f"V is copied during Q K^T, the next K during {'' if between else WEIGHING[spec.normalize]}P V"
    why_stages = beside if stages == 1 else "the next K and V are copied while these are used"
    rows = MMA_ROWS * needs.row_blocks(tile)
    shared = ", and a fragment of K or V serves two products" if rows > MMA_ROWS else ""
    blocks, room = blocks_told(facts, arch, tile), needs.blocks_of_an_sm(facts, arch, tile)
    room_for = f" an SM has room for {counted(room, 'block')}"
    own = FusedMmaPlan.of(
        spec,
        tile,
        q_in_registers=holds,
        warps_have=have,
        v_width=width(spec, tile),
        copies_between_steps=between,
        idle_copiers=idle_copiers(spec, tile),
        unrolled=1,  # more would take registers; other warps fill the time that a product takes
        one_stage_because=one_stage_because(facts, arch, tile),
    )
    decisions = (
        Decision("schedule", "fused_mma", f"{t} on tensor cores (mma.sync, which {arch.name} has)"),
        *score_decisions(facts),
        *decided(own, facts, "split"),
        tile_decision(spec, tile, why + room_for),
        Decision("warps", str(tile.warps), WARPS_HAVE[have].format(rows=rows, shared=shared)),
        Decision("stages", str(stages), why_stages, origin_of(spec.kernel.stages)),
        Decision("Q", "in registers" if holds else "in shared memory", _why_q(spec, tile, holds), origin_of(spec.kernel.q)),
        *decided(own, facts, "copies_between_steps", "idle_copiers"),
        *([Decision("partial sums", f"of {16 * mma.summed(tile)} keys", WHY_SUMMED)] if numbers.split else []),
        *([Decision("blocks per SM", str(blocks), WHY_BLOCKS)] if blocks else []),
        *([Decision("key vectors", "in shared memory", WHY_KEYS)] if staged.keys else []),
        *(Decision(expression_to_text(e.expr), "two keys at once", WHY_PAIRS) for e in staged.pairs),
        *row_term_decisions(staged),
        Decision("rows in shared memory", f"padded by {pad}", mma.WHY_PAD),
    )
    return planned(schedule, facts, arch, tile, decisions, needs.buffers(facts, tile), own, blocks=blocks, staged=staged)


def of_family(schedule: Schedule, family: Family, facts: SpecFacts, arch: Arch, keys: int) -> Plan | None:
    tile = Tile(family.rows * family.warps, keys, family.stages, family.warps)
    is_of_it = variant(facts, tile) == family.variant
    return with_tile(schedule, facts, arch, tile, family.form == "registers") if is_of_it else None


def _why_q(spec: AttentionSpec, tile: Tile, holds: bool) -> str:
    if spec.kernel.q:
        return ""
    if operands(spec).split:
        twice = 2 * q_registers(spec, needs.row_blocks(tile))
        return f"split in two, its fragments would take {twice} registers a thread, which spills others"
    needed = f"its fragments take {q_registers(spec, needs.row_blocks(tile))} registers a thread"
    return needed if holds else f"{needed}, which spills others"
