"""The naive schedule: the textbook. Three plain kernels with the scores in global memory, a thread per output element."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule, refusal
from attngen.plan.tile import Tile
from attngen.plan.tile_search import planned

THREADS = 128
TILE = Tile(1, THREADS, 1, THREADS // 32)  # the scores of a block
SLICE = 16


@dataclass(frozen=True, slots=True)
class NaivePlan(Own):
    slice: int  # terms of a sum that are summed by themselves
    threads_d: int  # per block that computes a row of O, dQ, dK or dV: one for each dimension


def refuse_overrides(facts: SpecFacts) -> None:
    """Raise PlanRefusal where the spec sets what this schedule does not have."""
    asked = facts.spec.kernel
    for field, value in (("tile", asked.block_q), ("stages", asked.stages), ("warps", asked.warps)):
        if value is not None:
            raise refusal("kernel", f"the naive kernels take no `{field}`", f"`{field} {value}` is stated", f"remove `{field}`")


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    refuse_overrides(facts)
    normalized = ["row weights"] if facts.spec.normalize != "none" else []  # else the scores are the weights
    *first, last = ["scores", *normalized, *(["dropout"] if facts.spec.dropout is not None else []), "weighted sum"]
    what = f"{', '.join(first)} and {last}"
    own = NaivePlan(SLICE, -(-facts.spec.head_dim_v // 32) * 32)
    decisions = (
        Decision("kernels", str(len(first) + 1), f"{what}, each as its equation reads"),
        Decision("THREADS", str(THREADS), "enough warps to hide latency; the kernels share nothing between threads"),
        Decision("THREADS_D", str(own.threads_d), "the head size of V in whole warps"),
        Decision("scores", "in global memory", "O(q_len * kv_len) bytes, which the other schedules reduce or avoid"),
    )
    return planned(schedule, facts, arch, TILE, decisions, own=own, workspaces=("S",))
