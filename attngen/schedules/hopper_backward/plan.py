"""The backward for Hopper: blocks that hold keys add up dK and dV, blocks that hold rows dQ; a producer, and consumers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from attngen.plan.arch import Arch
from attngen.plan.choices import choice, decided
from attngen.plan.code_size import INLINED_UP_TO
from attngen.plan.decisions import WHY_PAIRS, addition_decisions, saved_decisions, wanted_decision
from attngen.plan.facts import SpecFacts
from attngen.plan.group_parts import GroupParts, rounds_of
from attngen.plan.heads_in_l2 import HeadsInL2, heads_in_l2
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule, origin_of, refusal
from attngen.plan.saved import Dq, saved_results
from attngen.plan.shared_memory import aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned
from attngen.plan.visited_keys import visited
from attngen.schedules.hopper_backward.buffers import buffers, value_stages
from attngen.schedules.hopper_backward.form import (
    CONSUMERS,
    HALVES_KEYS,
    OF_ROWS,
    by_halves,
    clears_special,
    dq_of,
    kernels_of,
    keys_in_registers,
    row_numbers,
    rows_of,
    splits,
    staged,
    written_pairs,
)
from attngen.schedules.parts import wgmma
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, slabs
from attngen.spec.gradient import QKV

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
    by_halves: bool = False  # consumers of the kernel of keys: each half of the pairs of a tile, which meet in shared memory


WARPS = 4 * (CONSUMERS + 1)
REGISTERS = (40, 232)  # with those of two consumers, all of a multiprocessor
MOST_REGISTERS = (24, 240)
MOST_SUMS = 96  # registers of its sums up to which a consumer has enough with REGISTERS
STAGES = (3, 2)  # the first that fits shared memory
SPLIT_STAGES = 2  # where products are split
# keys per row on average, by the slabs of a head, from which additions are as fast (H200)
KEYS_WORTH_ADDING = {1: 128, 2: 300, 3: 400}
SUM_BYTES_IN_L2 = 16 << 20  # sums of dQ, in fp32, of the heads whose blocks run side by side
DS_SLOTS = 2  # tiles of dS if dQ is added up in global memory, as many as stages: one being written, and the one before


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


def cost(facts: SpecFacts, arch: Arch, tile: Tile) -> Cost:
    """What a tile takes: the registers do not depend on it."""
    return Cost(aligned(*buffers(facts, arch, tile.stages)))


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    """The only tile there is, with each number of stages that fits."""
    numbers = (SPLIT_STAGES,) if splits(facts) else (DS_SLOTS,) if dq_of(facts) == "additions" else STAGES
    keys = HALVES_KEYS if by_halves(facts) else WARPGROUP_ROWS
    possible = [Tile(rows_of(facts), keys, stages, WARPS) for stages in numbers]
    return fitting(arch, possible, lambda t: cost(facts, arch, t))


WORKSPACES = {"row_numbers": OF_ROWS, "dq_sums": {"convert_dq"}, "part_sums": {"add_parts"}}  # each with kernels that need it


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    reason = why_not(facts, arch)
    if reason:
        raise refusal("kernel", f"kernel hopper of these gradients on {arch.name}", reason, "use kernel fused, or auto")
    spec, fit = facts.spec, tiles(facts, arch)
    tile = pick_tile(spec, arch, fit, fit, lambda t: cost(facts, arch, t))
    split, halves, sizes = splits(facts), by_halves(facts), (spec.head_dim, spec.head_dim_v)
    own = HopperBackwardPlan(
        kernels=kernels_of(facts),
        dq=dq_of(facts),
        consumers=CONSUMERS,
        held=CONSUMERS * WARPGROUP_ROWS,
        held_keys=HALVES_KEYS if halves else WARPGROUP_ROWS if split else CONSUMERS * WARPGROUP_ROWS,
        split_products=split,
        value_stages=value_stages(facts, arch, tile.stages) if split else tile.stages,
        key_registers=register_split((max(sizes) if split else sum(sizes)) // 2),
        row_registers=register_split(spec.head_dim // 2),
        row_numbers=row_numbers(facts),
        output_slabs=0 if split or halves else max(map(slabs, sizes)),
        keys_in_registers=keys_in_registers(facts),
        by_halves=halves,
    )
    if "add_parts" in own.kernels:
        own = replace(own, parts=GroupParts(own.held_keys, rounds_of(mask_bounds(spec, (tile.block_q, tile.block_kv), "q"))))
    if halves:
        own = replace(own, key_registers=MOST_REGISTERS, dq_registers=SLAB // 2, dq_columns=spec.head_dim)
    elif own.dq == "additions":
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
        yield Decision("products of dQ", "a tile later", WHY_BESIDE_WEIGHTS if own.by_halves else WHY_LATER)
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
    each = "compute for 64 keys, or rows, each"
    what = "compute" if own.split_products else "compute half of the pairs of a tile each" if own.by_halves else each
    yield Decision("warpgroups", f"1 + {own.consumers}", f"one copies; {own.consumers} {what}")
    if own.split_products:
        shape = f"{own.held_keys} keys or {own.held} rows held, {WARPGROUP_ROWS} visited at a time"
        yield Decision("keys and rows", shape, "S, dP and one of the sums of 64 keys fit the registers of a warpgroup")
        yield from split_decisions(own)
    elif own.by_halves:
        yield Decision("keys and rows", f"{own.held_keys} keys held, {WARPGROUP_ROWS} rows visited at a time", WHY_HALVES_KEYS)
        yield Decision("sums", "dV and dQ by one consumer, dK by the other, dV and dK transposed", WHY_TRANSPOSED)
        yield Decision(
            "gradients go out", "over P and dS", "all products of the work tile have read them, and no more memory fits"
        )
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
WHY_BESIDE_WEIGHTS = "its products fill the tensor cores while the threads compute weights, and wait for no other consumer"
WHY_HALVES_KEYS = (
    "the more keys, the fewer additions to dQ for a pair: with 64, L2 would bind; dK and dV of 96 fit the registers"
)
WHY_TRANSPOSED = "keys are columns of a product, of which there may be 96; P and dS of both consumers meet in shared memory"
WHY_PARTS = "their sums of dK and dV are added in a fixed order by a kernel; a call with enough work tiles does not launch it"
WHY_CLEARED = "wgmma multiplies whole tiles, and 0, the weight of an excluded pair, times NaN is NaN"
WHY_WRITTEN = "dQ needs dS in shared memory: two warps write it to global memory beside the products"
WHY_SWIZZLE = "tiles in slabs of 64 columns, chunks of 16 bytes permuted: neither TMA nor wgmma meets a bank conflict"
