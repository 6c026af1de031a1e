"""The plan of the fused schedule without tensor cores: online softmax, fp32 tiles in shared memory, any element type."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.decisions import score_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.room import Estimated
from attngen.plan.shared_memory import COLUMN, ROW, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, kib, pick_tile, planned, tile_decision
from attngen.spec.attention import AttentionSpec

WARPS = 4
OTHER_REGISTERS = 56  # an estimate of what a thread has beside sums, scores and operands: addresses, sizes, loop counters
ROW_THREADS, COLUMN_THREADS = 16, 8  # the grid of a block's 128 threads over the tile
PAD = 4  # padding floats at the end of each row in shared memory: rows start 4 banks apart and stay 16-byte aligned

PREFERRED = tuple(Tile(q, kv, 1, WARPS) for q, kv in ((64, 64), (64, 32), (32, 32), (32, 16), (16, 16), (16, 8)))
POSSIBLE = tuple(Tile(q, kv, 1, WARPS) for q in (128, 64, 32, 16) for kv in (128, 64, 32, 16, 8))


@dataclass(frozen=True, slots=True)
class FusedSimtPlan(Own):
    slice: int  # terms of one partial sum of Q K^T
    vector: int  # neighbouring dimensions of O that a thread reads and writes as one vector


def buffers(facts: SpecFacts, tile: Tile) -> tuple[SharedBuffer, ...]:
    spec = facts.spec

    def rows(name: str, count: int, width: int, use: str, read: str = COLUMN) -> SharedBuffer:
        return SharedBuffer(name=name, element="fp32", shape=(count, width), use=use, pad=PAD, read=read)

    q, kv = tile.block_q, tile.block_kv
    return (
        rows("Q", q, spec.head_dim, "the block's query rows"),
        rows("K", kv, spec.head_dim, "the tile's keys"),
        rows("V", kv, spec.head_dim_v, "the tile's values", ROW),
        rows("P", q, kv, "the tile's weights, each row used by the warp that wrote it"),
    )


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    rows = tile.block_q // ROW_THREADS
    scores = rows * tile.block_kv // COLUMN_THREADS
    # scores count twice: a partial sum has an accumulator of its own
    output = rows * facts.spec.head_dim_v // COLUMN_THREADS
    operands = 4 * (rows + tile.block_kv // COLUMN_THREADS)
    return Cost(aligned(*buffers(facts, tile)), Estimated(2 * scores + output + operands + 4 * rows + OTHER_REGISTERS))


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*PREFERRED, *POSSIBLE), lambda t: cost(facts, t))


def choices(spec: AttentionSpec) -> FusedSimtPlan:
    per_thread = spec.head_dim_v // COLUMN_THREADS
    return FusedSimtPlan(slice=16 if spec.head_dim % 16 == 0 else 8, vector=next(n for n in (4, 2, 1) if per_thread % n == 0))


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    """The plan with the largest tile that fits: the most products for each operand that is read from shared memory."""
    spec = facts.spec
    tile = pick_tile(spec, arch, PREFERRED, POSSIBLE, lambda t: cost(facts, t))
    own, dims = choices(spec), spec.head_dim_v // COLUMN_THREADS
    why = f"the largest preferred tile that fits {kib(arch.shared_per_block)} of shared memory and the registers"
    decisions = (
        *score_decisions(facts),
        tile_decision(spec, tile, why),
        Decision("THREADS", str(32 * WARPS), f"{ROW_THREADS} x {COLUMN_THREADS} threads over the tile"),
        Decision("SLICE", str(own.slice), "terms of Q K^T that are summed by themselves, a divisor of the head size"),
        Decision("VECTOR", str(own.vector), f"a thread has {dims} dimensions of O, in whole vectors"),
        Decision("stages", "1", "other blocks on the same multiprocessor compute while this one loads"),
    )
    return planned(schedule, facts, arch, tile, decisions, buffers(facts, tile), own)
