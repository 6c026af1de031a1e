"""The plan of decode by wgmma: a warpgroup copies keys; two take turns with their tiles, and have half of O's columns each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.arch import Arch, Feature
from attngen.plan.captured_staging import Staged
from attngen.plan.choices import choice, decided
from attngen.plan.decisions import rough_decisions, row_term_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule, one_type
from attngen.plan.prepared import scales_keys
from attngen.plan.room import PLENTY
from attngen.plan.shared_memory import SharedBuffer, aligned
from attngen.plan.split_keys import INVARIANT_KEYS, Splits
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.schedules.decode import plan as decode
from attngen.schedules.decode import shares
from attngen.schedules.decode.memory import OUTPUT_PAD
from attngen.schedules.parts import wgmma
from attngen.schedules.parts.mma import MMA_ROWS
from attngen.schedules.parts.wgmma import SLAB, WARPGROUP_ROWS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec

CONSUMERS = 2  # warpgroups that take turns, each with a stage of its own
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # registers of a thread: multiples of 8, together those of the launch
LEAST_ROWS = WARPGROUP_ROWS  # packed rows of a call, at least: with fewer, products take less time than reading keys
HELD_SLABS = CONSUMERS  # slabs of Q that stay in registers: weights are handed on in their place
MOST_COLUMNS = 256  # columns of O in the registers of a consumer
TILE = Tile(WARPGROUP_ROWS, SLAB, CONSUMERS, 4 * (CONSUMERS + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWgmmaPlan(Own):
    """What each call of it has alike: see the kernel."""

    early: bool = choice("launch", {True: ("programmatic dependent launch", decode.WHY_EARLY)})


def why_not(facts: SpecFacts, arch: Arch) -> str:
    """Why the schedule is not what the keyword stands for: also for a spec that states fewer heads than a product has rows."""
    group = facts.spec.stated_group
    if group < WARPGROUP_ROWS:
        return f"a product of wgmma has {WARPGROUP_ROWS} rows, and the spec states {group} heads for each key head"
    return cannot(facts, arch)


def types(spec: AttentionSpec) -> Iterator[tuple[str, str]]:
    """What keeps it from tensors of several types: what keeps decode from them, and that its own have one."""
    yield from decode.types(spec)
    yield from one_type(spec)


def cannot(facts: SpecFacts, arch: Arch) -> str:
    """Why it cannot compute the spec, whatever the heads of a call; empty if it can."""
    spec = facts.spec
    if reason := wgmma.why_not_beside_terms(facts, arch):
        return reason
    if spec.is_mixed:
        return "products of wgmma read K and V of the type of Q"
    if scales_keys(spec):
        return "its consumers multiply no weights by scales of V"
    if spec.dropout is not None or spec.normalize != "softmax":
        return "its consumers hand on the maxima of a softmax, without dropout"
    if spec.values is None or spec.rotary is not None:
        return "shared memory has room for keys alone: values are a part of them"
    if facts.bounds.per_tile:
        return "all its warpgroups visit the tiles of a range, and this mask is classified tile by tile"
    if spec.values[0] % SLAB or spec.head_dim % SLAB or spec.head_dim_v % (CONSUMERS * SLAB):
        return f"each consumer has whole slabs of {SLAB} columns of V"
    if spec.head_dim_v > CONSUMERS * MOST_COLUMNS:
        return f"O has at most {CONSUMERS * MOST_COLUMNS} columns"
    if spec.kernel.is_paged and (spec.kernel.page_size or 1) % MMA_ROWS:
        return f"TMA copies keys of one page at once, which requires a stated page_size, a multiple of {MMA_ROWS}"
    return cost(facts, TILE).why_not(arch, 32 * TILE.warps)


def buffers(spec: AttentionSpec, tile: Tile) -> tuple[SharedBuffer, ...]:
    t, d, stages = spec.dtype.name, slabs(spec.head_dim), tile.stages

    def of_rows(name: str, use: str) -> SharedBuffer:
        return SharedBuffer(name=name, element="float", shape=(CONSUMERS, tile.block_q), use=use)

    return (
        slab_tiles("K", t, (stages, d, tile.block_kv), f"the keys of {stages} tiles, which have the values", then="O"),
        slab_tiles("Q", t, (d, tile.block_q), f"the block's rows; P of {CONSUMERS} tiles in place of the last slabs"),
        of_rows("MAX", "the maxima of rows, of the latest tile of each consumer"),
        of_rows("SUM", "the sums of weights, of each consumer"),
        SharedBuffer(name="BARRIERS", element="mbarrier", shape=(2 * stages * d + CONSUMERS,), use="see the kernel"),
    )


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    spec = facts.spec
    sums = tile.block_q * (spec.head_dim_v + OUTPUT_PAD) * 4  # where K and Q have been
    assert sums <= sum(b.bytes for b in buffers(spec, tile)[:2])
    return Cost(aligned(*buffers(spec, tile)), PLENTY)


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (TILE,), lambda t: cost(facts, t))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec = facts.spec
    tile = pick_tile(spec, arch, (TILE,), (TILE,), lambda t: cost(facts, t))
    splits = Splits(tile.block_q, INVARIANT_KEYS, 0) if spec.kernel.batch_invariant else Splits(tile.block_q, ROUND, 1)
    own = DecodeWgmmaPlan(copies="tma", key_warps=CONSUMERS, splits=splits, early=arch.has(Feature.GRID_DEPENDENCY))
    staged = Staged(terms=facts.row_terms)
    decisions = (
        Decision("schedule", "decode", f"{spec.dtype.name} on tensor cores by wgmma, which {arch.name} has, {WHY}"),
        Decision(
            "auto takes it", f"for calls of {decode.FEW}, with at least {WARPGROUP_ROWS} rows for each key head", WHY_AUTO
        ),
        *rough_decisions(facts),
        *row_term_decisions(staged),
        Decision("rows", "those of all heads that share keys", WHY_ROWS),
        Decision("warpgroups", f"1 + {CONSUMERS}", WHY_GROUPS),
        tile_decision(spec, tile, "the rows of a product, and keys of which two tiles fit shared memory beside Q"),
        Decision("stages", str(tile.stages), "one for each consumer"),
        Decision("registers", f"{PRODUCER_REGISTERS} and {CONSUMER_REGISTERS} a thread", WHY_REGISTERS),
        Decision("Q", f"{HELD_SLABS} slabs in registers, the others in shared memory", WHY_HELD),
        Decision("splits", *(decode.WHY_INVARIANT if spec.kernel.batch_invariant else decode.WHY_SPLITS)),
        Decision("V", "in the tiles of K", shares.WHY_IN_KEYS),
        Decision("K", "copied by TMA, slab by slab", WHY_SLABS),
        *decided(own, facts),
        Decision("partial results", "O before division by l, with m and l", decode.WHY_SUMS),
        Decision("swizzle", "128 bytes", wgmma.WHY_SLABS),
    )
    workspaces = ("split_O", "split_max", "split_sum")
    return planned(schedule, facts, arch, tile, decisions, buffers(spec, tile), own, staged=staged, workspaces=workspaces)


ROUND = 2 * CONSUMERS * TILE.block_kv  # keys of a round: starting a block takes as long as about four tiles
WHY = "for few rows and many keys, where a key head has rows for a product of 64"
WHY_AUTO = "so many rows need more products for each key that is read than mma.sync computes in the time of reading it"
WHY_ROWS = f"keys are read once for {WARPGROUP_ROWS} of them; a product has as many rows even if there are fewer"
WHY_GROUPS = (
    "one copies; O of 64 rows is too wide for the registers of one, so two have half of its columns each; they compute weights "
    "in turn"
)
WHY_HELD = "weights are handed on in their place, and their products read one operand in shared memory, not two"
WHY_REGISTERS = "of the producer and of the consumers, which have half of O, S and P"
WHY_SLABS = "a slab is copied as soon as both products of V have read its place, and multiplied as soon as it is there"
