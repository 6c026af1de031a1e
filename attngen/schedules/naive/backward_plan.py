"""The naive backward: plain kernels with S, dP and what follows from them in global memory, a thread per output element."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.decisions import unfused_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.tile_search import planned
from attngen.schedules.naive.plan import SLICE, THREADS, TILE, NaivePlan
from attngen.schedules.parts.unfused_backward import kernels_and_workspaces


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec = facts.spec
    kernels, kept = kernels_and_workspaces(facts)
    own = NaivePlan(SLICE, -(-max(spec.head_dim, spec.head_dim_v) // 32) * 32, kernels=kernels)
    gradients, weights, in_memory = unfused_decisions(facts, kept)
    decisions = (
        gradients,
        weights,
        Decision("THREADS", str(THREADS), "enough warps to hide latency; the kernels share nothing between threads"),
        Decision("THREADS_D", str(own.threads_d), "the larger head size in whole warps"),
        in_memory,
        Decision("order of sums", "fixed", "a thread adds up one element by itself: the same bits in every run, no atomics"),
    )
    return planned(schedule, facts, arch, TILE, decisions, own=own, workspaces=kept)
