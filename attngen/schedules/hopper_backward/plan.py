"""The backward for Hopper: blocks that hold keys add up dK and dV, blocks that hold rows dQ; a producer, and consumers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from attngen.diagnostics import counted
from attngen.plan.arch import Arch
from attngen.plan.captured_staging import NOTHING, Staged, pair_elements
from attngen.plan.captured_sums import is_ds
from attngen.plan.choices import choice, decided
from attngen.plan.code_size import INLINED_UP_TO, operations
from attngen.plan.decisions import WHY_PAIRS, addition_decisions, saved_decisions, wanted_decision
from attngen.plan.facts import SpecFacts
from attngen.plan.group_parts import GroupParts, rounds_of
from attngen.plan.heads_in_l2 import HeadsInL2, heads_in_l2
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule, origin_of, refusal
from attngen.plan.saved import Dq, needs_lse_rest, saved_results
from attngen.plan.shared_memory import COLUMN, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned
from attngen.plan.visited_keys import visited
from attngen.schedules.parts import wgmma
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV
from attngen.spec.operator import FLOAT_ONE

WHY_HELD = "operands of S and dP that stay for all tiles; from shared memory, each product would read them again"
Registers = tuple[int, int]  # per thread of the producer, and of a consumer


@dataclass(frozen=True, slots=True)
class HopperBackwardPlan(Own):
    dq: Dq
    consumers: int  # warpgroups that multiply
    split_products: bool  # consumers of the kernel of keys: each its own sum for the same 64 keys, else each its own 64 keys
    value_stages: int  # tiles of values in shared memory, of the kernel of rows; of all other tiles there are `Plan.stages`
    key_registers: Registers  # in the kernel whose blocks hold keys
    row_registers: Registers
    row_numbers: int  # numbers per row that all its tiles need
    output_slabs: int  # slabs of a warp's rows of a gradient, on their way to global memory; 0: they go out over an operand
    # the keys and values that a block of the kernel of keys holds are operands in registers
    keys_in_registers: bool = choice("keys of a block", {True: ("in registers", WHY_HELD)}, default=False)
    dq_parts: Literal["rows", "columns", ""] = ""  # what a consumer's part of a tile of dQ is; additions only
    dq_registers: int = 0  # per thread, for that part
    dq_columns: int = 0  # sums of a row of dQ
    dv_steps: int = 4  # a tile's products for dV that are issued before dP is awaited
    early_additions: int = 0  # additions per thread and tile of dQ that are issued between the products for dK


CONSUMERS = 2
WARPS = 4 * (CONSUMERS + 1)
WARPGROUP = 128  # threads
REGISTERS = (40, 232)  # with those of two consumers, all of a multiprocessor
MOST_REGISTERS = (24, 240)
MOST_SUMS = 96  # registers of its sums up to which a consumer has enough with REGISTERS
MOST_OF_BOTH = 128  # registers of dK and dV up to which a consumer has both
STAGES = (3, 2)  # the first that fits shared memory
SPLIT_STAGES = 2  # where products are split
MAX_ADDED_HEAD_DIM = 128  # for each head size, if dQ is added up in global memory: a part of dQ needs registers too
KEYS_WORTH_ADDING = {1: 128, 2: 300}  # keys per row on average, by the slabs of a head, from which additions are as fast (H200)
SUM_BYTES_IN_L2 = 16 << 20  # sums of dQ, in fp32, of the heads whose blocks run side by side
DS_SLOTS = 2  # tiles of dS if dQ is added up in global memory, as many as stages: one being written, and the one before
WORK_WORDS = 8  # what tells a work tile: the members of Work, one less if there are no groups
FOUND = 64  # places of tiles that the producer has found
VISIT_WORDS = 2  # what tells a tile to visit: the tile, and its head


def dq_of(facts: SpecFacts) -> Dq:
    """Who adds up dQ: a kernel of its own; or blocks that hold keys, if its last bits may differ and registers suffice."""
    if "q" not in facts.wanted:
        return ""
    spec = facts.spec
    limit = MAX_ADDED_HEAD_DIM if spec.dropout is None else SLAB  # random bits take registers too
    fits = max(spec.head_dim, spec.head_dim_v) <= limit and slabs(spec.head_dim) == slabs(spec.head_dim_v)
    adds = "k" in facts.wanted and not facts.deterministic and spec.normalize == "softmax" and fits
    return "additions" if adds else "own kernel"


def written_pairs(facts: SpecFacts) -> tuple[str, ...]:
    """The captured tensors whose gradient is dS as blocks that add to dQ have it in shared memory: in the type of Q, before any
    derivative. Without a mask, every element is written."""
    spec, gradient = facts.spec, facts.gradient
    assert gradient is not None
    every = spec.mask is None and spec.kernel.storage == "dense"
    if dq_of(facts) != "additions" or not every or gradient.ds is not FLOAT_ONE:
        return ()
    return tuple(i.name for i in spec.inputs if i.name in facts.wanted and i.dtype is spec.dtype and is_ds(gradient.of(i.name)))


def staged(facts: SpecFacts) -> Staged:
    """The element of each pair of a tile that blocks of keys find in shared memory: of one tensor, for which there is room."""
    return (
        Staged(pairs=pair_elements(facts.spec).pairs[:1])
        if dq_of(facts) == "additions" and facts.spec.kernel.storage == "dense"
        else NOTHING
    )


def pair_slots(facts: SpecFacts) -> int:
    """The tiles of these elements: two if consumers do not wait for each other; with more than 64 rows, there is no room."""
    return len(staged(facts).pairs) * (2 if rows_of(facts) == WARPGROUP_ROWS else 1)


def is_faster_in_order(facts: SpecFacts, q_len: int, kv_len: int) -> bool:
    """Whether dQ by a kernel of its own is faster: where rows visit few keys, zeros and conversion cost more than products."""
    if dq_of(facts) != "additions" or written_pairs(facts):  # in order, these take a kernel of their own
        return False
    return bool(visited(facts.bounds, q_len, kv_len).mean[0] < KEYS_WORTH_ADDING[slabs(facts.spec.head_dim)])


def heads_side_by_side(facts: SpecFacts) -> tuple[HeadsInL2, str]:
    """The rule for the work tiles, and the reason. Blocks that add to dQ need the sums of their heads in L2; with too few heads
    an SM has no other work tile when the last ones of a section end."""
    if dq_of(facts) != "additions" or facts.bounds.uniform:
        return heads_in_l2(facts)
    rule = HeadsInL2(SUM_BYTES_IN_L2 // (4 * slabs(facts.spec.head_dim) * SLAB), 8, 32)
    return rule, f"as many heads as have {SUM_BYTES_IN_L2 >> 20} MiB of sums of dQ, {rule.least} to {rule.most}: L2 keeps these"


def rows_of(facts: SpecFacts) -> int:
    """The rows of a tile that a block of keys visits."""
    assert facts.gradient is not None
    fits = (
        facts.spec.dropout is None
        and slabs(facts.spec.head_dim) == 1
        and (operations(facts.gradient.ds) == 0 or facts.spec.head_dim % 16 > 0)
    )
    return 2 * WARPGROUP_ROWS if dq_of(facts) == "additions" and fits else WARPGROUP_ROWS


def keys_in_registers(facts: SpecFacts) -> bool:
    """Whether keys and values that a block holds stay in registers: with heads of one slab, 64 rows, no random bits."""
    spec = facts.spec
    narrow = max(spec.head_dim, spec.head_dim_v) <= SLAB and spec.dropout is None
    return "k" in facts.wanted and narrow and rows_of(facts) == WARPGROUP_ROWS


def kernels_of(facts: SpecFacts) -> tuple[str, ...]:
    needed = {
        "delta": facts.spec.normalize == "softmax",
        "special_rows": facts.spec.normalize != "softmax" and clears_special(facts.spec) and "k" in facts.wanted,
        "dk_dv": "k" in facts.wanted,
        "add_parts": "k" in facts.wanted and may_be_grouped(facts.spec),
        "dq": dq_of(facts) == "own kernel",
        "convert_dq": dq_of(facts) == "additions",
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def may_be_grouped(spec: AttentionSpec) -> bool:
    """Whether query heads may share keys."""
    return spec.q_heads is None or spec.q_heads != spec.kv_heads


def why_not(facts: SpecFacts, arch: Arch) -> str:
    assert facts.gradient is not None
    reason = wgmma.why_not(facts, arch)
    if reason:
        return reason
    captured = [n for n in facts.wanted if n not in (*QKV, *written_pairs(facts))]
    if captured:
        return f"it computes no gradients of captured values ({', '.join(captured)}) but those that are dS of each pair"
    if ("k" in facts.wanted) != ("v" in facts.wanted):
        return "it computes the gradients of k and v together"
    if facts.pair_cost > INLINED_UP_TO:
        return f"it computes at most {INLINED_UP_TO} additions for each pair, with the derivative: its code is inlined"
    return ""


def clears_special(spec: AttentionSpec) -> bool:
    """Whether NaN and infinity at pairs that the mask excludes are kept from the sums: pairs that it allows still have them."""
    return spec.mask is not None


def row_numbers(facts: SpecFacts) -> int:
    """The numbers of a row: lse in powers of 2, delta, and what is subtracted from large scores; without lse, one that is NaN
    if the row has NaN or infinity."""
    return 2 + needs_lse_rest(facts.spec) if facts.spec.normalize == "softmax" else 1


def splits_products(spec: AttentionSpec) -> bool:
    """Whether dK and dV of 64 keys are too much for one consumer of the kernel of keys."""
    return (spec.head_dim + spec.head_dim_v) // 2 > MOST_OF_BOTH


def tiles_of(spec: AttentionSpec, name: str, extents: tuple[int, ...], use: str, read: str | None = COLUMN) -> SharedBuffer:
    """Tiles in slabs; `extents` are those before the columns."""
    return slab_tiles(name, spec.dtype.name, extents, use, read=read)


def buffers(facts: SpecFacts, arch: Arch, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block: of either kernel alike, or of each its own where products are split."""
    if not splits_products(facts.spec):
        return buffers_of_both(facts, stages)
    of_keys = buffers_of_keys(facts, stages)
    of_rows = buffers_of_rows(facts, stages, value_stages(facts, arch, stages))
    kernels = kernels_of(facts)
    named = (("dk_dv", "KEYS_", of_keys), ("dq", "ROWS_", of_rows))
    return tuple(
        replace(b, name=prefix + b.name, kernel=k) for k, prefix, all_of_it in named if k in kernels for b in all_of_it
    )


def value_stages(facts: SpecFacts, arch: Arch, stages: int) -> int:
    """As many as fit: values are released before the keys of their tile, and one stage is less of a loss than with keys."""
    return next((n for n in (2, 1) if aligned(*buffers_of_rows(facts, stages, n)) <= arch.shared_per_block), 1)


def buffers_of_keys(facts: SpecFacts, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of keys with split products. A sum goes out over the operand of its consumer alone."""
    spec, rows = facts.spec, WARPGROUP_ROWS
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    numbers = (stages, row_numbers(facts), rows)
    staged = SharedBuffer(name="ROW_NUMBERS", element="float", shape=numbers, use="numbers of the rows of each stage")
    return (
        tiles_of(spec, "HELD_QK", (max(d, dv), rows), "the keys that the block holds, in the end dV"),
        tiles_of(spec, "HELD_V", (max(d, dv), rows), "the values that the block holds, in the end dK"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of Q"),
        tiles_of(spec, "VISITED_V", (stages, dv, rows), f"{stages} tiles of dO"),
        SharedBuffer(name="WEIGHTS", element="float", shape=(stages, rows, rows), use="weights of each stage"),
        *([staged] if OF_ROWS & {*kernels_of(facts)} else []),
        *words(stages, 4 + 4 * stages),
    )


def buffers_of_rows(facts: SpecFacts, stages: int, values: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of the kernel of rows beside such a kernel of keys."""
    spec, rows, held = facts.spec, WARPGROUP_ROWS, CONSUMERS * WARPGROUP_ROWS
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    return (
        tiles_of(spec, "HELD_QK", (d, held), "the rows of Q that the block holds, in the end dQ"),
        tiles_of(spec, "HELD_V", (dv, held), "the rows of dO that the block holds"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of keys"),
        tiles_of(spec, "VISITED_V", (values, dv, rows), f"{counted(values, 'tile')} of values"),
        *words(stages, 4 + 2 * stages + 2 * values),
    )


def words(stages: int, barriers: int, of_stage: int = VISIT_WORDS) -> tuple[SharedBuffer, ...]:
    """What the roles of a block tell each other."""
    count = 2 * WORK_WORDS + VISIT_WORDS * FOUND + of_stage * stages
    use = "two work tiles, the tiles that were found, and that of each stage"
    return (
        SharedBuffer(name="BARRIERS", element="mbarrier", shape=(barriers,), use="see the kernels"),
        SharedBuffer(name="VISITS", element="int", shape=(count,), use=use),
    )


def buffers_of_both(facts: SpecFacts, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of either kernel: what it holds, and stages of the tiles that it visits."""
    spec, rows, adds = facts.spec, rows_of(facts), dq_of(facts) == "additions"
    d, dv, held = slabs(spec.head_dim), slabs(spec.head_dim_v), CONSUMERS * WARPGROUP_ROWS
    numbers = SharedBuffer(
        name="ROW_NUMBERS", element="float", shape=(stages, row_numbers(facts), rows), use="numbers of the rows of each stage"
    )
    return (
        tiles_of(spec, "HELD_QK", (d, held), "the keys that the block holds, or the rows of Q"),
        tiles_of(spec, "HELD_V", (dv, held), "the values that the block holds, or the rows of dO"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of Q, or of keys"),
        tiles_of(spec, "VISITED_V", (stages, dv, rows), f"{stages} tiles of dO, or of values"),
        *([tiles_of(spec, "DS", (stages, CONSUMERS, rows), f"dS of {stages} tiles")] if adds else []),
        *(tiles_of(spec, "PAIRS", (pair_slots(facts), CONSUMERS, rows), f"{e.input} of a tile") for e in staged(facts).pairs),
        tiles_of(
            spec, "OUT", (4 * CONSUMERS, max(d, dv), 16), "rows of a gradient of each warp, on their way to global memory", None
        ),
        *([numbers] if OF_ROWS & {*kernels_of(facts)} and "dk_dv" in kernels_of(facts) else []),
        *words(stages, 4 + (5 if adds else 3) * stages + 2 * pair_slots(facts), VISIT_WORDS + adds),
    )


def cost(facts: SpecFacts, arch: Arch, tile: Tile) -> Cost:
    """What a tile takes: the registers do not depend on it."""
    return Cost(aligned(*buffers(facts, arch, tile.stages)))


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The only tile there is, with each number of stages that fits."""
    numbers = (SPLIT_STAGES,) if splits_products(facts.spec) else (DS_SLOTS,) if dq_of(facts) == "additions" else STAGES
    possible = [Tile(rows_of(facts), WARPGROUP_ROWS, stages, WARPS) for stages in numbers]
    return fitting(arch, possible, lambda t: cost(facts, arch, t))


OF_ROWS = {"delta", "special_rows"}  # kernels of the numbers of rows
WORKSPACES = {"row_numbers": OF_ROWS, "dq_sums": {"convert_dq"}, "part_sums": {"add_parts"}}  # each with kernels that need it


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    reason = why_not(facts, arch)
    if reason:
        raise refusal("kernel", f"kernel hopper of these gradients on {arch.name}", reason, "use kernel fused, or auto")
    spec, fit = facts.spec, tiles(facts, arch)
    tile = pick_tile(spec, arch, fit, fit, lambda t: cost(facts, arch, t))
    split, sizes = splits_products(spec), (spec.head_dim, spec.head_dim_v)
    own = HopperBackwardPlan(
        kernels=kernels_of(facts),
        dq=dq_of(facts),
        consumers=CONSUMERS,
        held=CONSUMERS * WARPGROUP_ROWS,
        held_keys=WARPGROUP_ROWS if split else CONSUMERS * WARPGROUP_ROWS,
        split_products=split,
        value_stages=value_stages(facts, arch, tile.stages) if split else tile.stages,
        key_registers=register_split((max(sizes) if split else sum(sizes)) // 2),
        row_registers=register_split(spec.head_dim // 2),
        row_numbers=row_numbers(facts),
        output_slabs=0 if split else max(map(slabs, sizes)),
        keys_in_registers=keys_in_registers(facts),
    )
    if "add_parts" in own.kernels:
        own = replace(own, parts=GroupParts(own.held_keys, rounds_of(mask_bounds(spec, (tile.block_q, tile.block_kv), "q"))))
    if own.dq == "additions":
        by_rows, masked = tile.block_q > WARPGROUP_ROWS, spec.mask is not None
        columns = spec.head_dim if slabs(spec.head_dim) == 1 else slabs(spec.head_dim) * SLAB
        if not by_rows:  # a product of each consumer's columns, in eights
            columns = -(-columns // (8 * CONSUMERS)) * 8 * CONSUMERS
        own = replace(
            own,
            key_registers=MOST_REGISTERS,
            dq_parts="rows" if by_rows else "columns",
            dq_registers=columns // 2 if by_rows else columns // 2 // CONSUMERS,
            dq_columns=spec.head_dim,
            dv_steps=(6 if masked else 5) if by_rows else tile.block_q // 16,
            early_additions=0 if by_rows or masked else columns // 2 // CONSUMERS // 4 // 2,
        )
    return planned(
        schedule,
        facts,
        arch,
        tile,
        tuple(decisions(facts, own, tile.stages)),
        buffers(facts, arch, tile.stages),
        own,
        saved=saved_results(facts),
        written_pairs=written_pairs(facts),
        staged=staged(facts),
        workspaces=tuple(name for name, kernels in WORKSPACES.items() if kernels & {*own.kernels}),
    )


def register_split(sums: int) -> Registers:
    """Registers of a producer's and of a consumer's thread, by those of its sums."""
    return MOST_REGISTERS if sums > MOST_SUMS else REGISTERS


def decisions(facts: SpecFacts, own: HopperBackwardPlan, stages: int) -> Iterator[Decision]:
    yield wanted_decision(facts)
    if {"dk_dv", "dq"} <= {*own.kernels}:
        yield Decision("dK and dV, dQ", "by two kernels", WHY_TWO if facts.deterministic else WHY_TWO_ANYWAY)
    if own.dq == "additions":
        yield from addition_decisions()
        yield Decision("products of dQ", "a tile later", WHY_LATER)
        for element in staged(facts).pairs:
            yield Decision(f"{element.input}", "in shared memory", WHY_PAIRS)
        for name in written_pairs(facts):
            yield Decision(f"d_{name}", "dS of each pair", WHY_WRITTEN)
    else:
        yield Decision(
            "deterministic",
            "yes",
            "each sum belongs to one block and has a fixed order: no atomics, the same bits in every run",
        )
    if own.parts is not None:
        yield Decision("query heads of a group", "over several work tiles if there are few", WHY_PARTS)
    yield from saved_decisions(saved_results(facts))
    if "delta" in own.kernels:
        yield Decision("lse and delta", "stored together by tiles", "one copy in the background brings those of a tile")
    if clears_special(facts.spec):
        yield Decision("NaN and infinity in partial tiles", "left out", WHY_CLEARED)
    what = "compute" if own.split_products else "compute for 64 keys, or rows, each"
    yield Decision("warpgroups", f"1 + {own.consumers}", f"one copies; {own.consumers} {what}")
    if own.split_products:
        shape = f"{own.held_keys} keys or {own.held} rows held, {WARPGROUP_ROWS} visited at a time"
        yield Decision("keys and rows", shape, "S, dP and one of the sums of 64 keys fit the registers of a warpgroup")
        yield from split_decisions(own)
    else:
        shape = f"{own.held} held, {rows_of(facts)} visited at a time"
        yield Decision("keys and rows", shape, "S, dP and the sums of 64 keys fit the registers of a warpgroup")
    yield from decided(own, facts, "keys_in_registers")
    yield Decision("stages", str(stages), "later tiles are copied while one is used", origin_of(facts.spec.kernel.stages))
    used = {"dk_dv": own.key_registers, "dq": own.row_registers}
    splits = sorted({f"{used[n][0]} and {used[n][1]}" for n in own.kernels if n in used})
    yield Decision("registers", ", or ".join(splits) + " a thread", "copying needs few; sums, S and dP need many")
    yield Decision(
        "next scores", "during the sums", "Q K^T of the next tile runs together with the products of the sums of this one"
    )
    yield Decision(
        "blocks", "one for each SM", "persistent kernels: a block takes work tiles from a counter, the longest first"
    )
    yield Decision("swizzle", "128 bytes", WHY_SWIZZLE)


def split_decisions(own: HopperBackwardPlan) -> Iterator[Decision]:
    """What follows from sums that are too large for one consumer."""
    if "dk_dv" in own.kernels:
        because = "dK and dV of 64 keys do not fit the registers of one warpgroup; weights pass through shared memory, in fp32"
        yield Decision("products of keys", "S, P and dV by one consumer, dP, dS and dK by the other", because)
    if "dq" in own.kernels:
        yield Decision("stages of values", str(own.value_stages), "they are released before the keys of their tile")
    yield Decision("gradients go out", "over an operand", "its consumer has read it for the last time, and no more memory fits")


WHY_TWO = "both compute S and dP, seven products instead of five; one kernel would have to add dQ in global memory"
WHY_TWO_ANYWAY = "additions to dQ in global memory are for a softmax and head sizes of equally many slabs"
WHY_LATER = "when both consumers have written their dS long ago: neither waits for the other, and each fills the other's gaps"
WHY_PARTS = "their sums of dK and dV are added in a fixed order by a kernel; a call with enough work tiles does not launch it"
WHY_CLEARED = "wgmma multiplies whole tiles, and 0, the weight of an excluded pair, times NaN is NaN"
WHY_WRITTEN = "dQ needs dS in shared memory: two warps write it to global memory beside the products"
WHY_SWIZZLE = "tiles in slabs of 64 columns, chunks of 16 bytes permuted: neither TMA nor wgmma meets a bank conflict"
