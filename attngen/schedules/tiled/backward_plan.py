"""The plan of the tiled backward: the naive backward with tiles in shared memory and registers; empty tiles are skipped."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.decisions import unfused_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.tile_search import planned
from attngen.schedules.parts.unfused_backward import kernels_and_workspaces
from attngen.schedules.tiled.plan import BLOCK_DV, PREFERRED, ROWS_PER_PAD, WHY_PAD, WHY_TILE, TiledPlan, outputs, thread_grid
from attngen.spec.gradient import QKV


@dataclass(frozen=True, slots=True)
class TiledBackwardPlan(TiledPlan):
    fills: bool  # whether pairs of empty tiles are set to zero, because a later kernel visits all pairs


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec, tile = facts.spec, PREFERRED[0]
    kernels, kept = kernels_and_workspaces(facts)
    of_captured = any(n not in QKV for n in facts.wanted) and "dP" in kept
    if of_captured and "score_gradients" not in kernels:
        at = kernels.index("delta" if "delta" in kernels else "weight_gradients") + 1
        kernels = (*kernels[:at], "score_gradients", *kernels[at:])
    rows, columns, _ = outputs(tile)
    terms = 16 if spec.head_dim % 16 == spec.head_dim_v % 16 == 0 else 8
    pad = 32 * ROWS_PER_PAD // terms
    own = TiledBackwardPlan(*thread_grid(tile.warps), rows, columns, terms, pad, of_captured, kernels=kernels)
    decisions = (
        *unfused_decisions(facts, kept),
        Decision("BLOCK_Q x BLOCK_KV", f"{tile.block_q} x {tile.block_kv}", WHY_TILE),
        Decision("BLOCK_D", str(BLOCK_DV), "dimensions of a gradient of a block: as many as a tile has keys"),
        Decision("THREADS", str(32 * tile.warps), f"{own.row_threads} x {own.column_threads} threads, each {rows} x {columns}"),
        Decision("SLICE", str(terms), "a divisor of both head sizes"),
        Decision("PAD", str(pad), WHY_PAD),
        Decision("order of sums", "fixed", "a block adds up alone what it owns: the same bits in every run, no atomics"),
    )
    return planned(schedule, facts, arch, tile, decisions, own=own, workspaces=kept)
