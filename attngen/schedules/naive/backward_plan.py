"""The naive backward: plain kernels with S, dP and what follows from them in global memory, a thread per output element."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.decisions import unfused_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.tile_search import planned
from attngen.schedules.naive.plan import SLICE, THREADS, TILE, NaivePlan
from attngen.spec.expr import names_in
from attngen.spec.gradient import gradient_argument
from attngen.spec.operator import FLOAT_ONE


@dataclass(frozen=True, slots=True)
class NaiveBackwardPlan(NaivePlan):
    """The choices of this schedule."""

    kernels: tuple[str, ...]  # in launch order: those that the wanted gradients need


def kernels_and_workspaces(facts: SpecFacts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kernels that the wanted gradients need, and what they keep in global memory."""
    assert facts.gradient is not None
    wanted, ds, normalize = facts.wanted, facts.gradient.ds, facts.spec.normalize
    captured = [one for one in facts.gradient.captured if one.name in wanted]
    contributions = [c for one in captured for c in one.contributions]
    sources = {c.source for c in contributions}
    needs_ds = bool({"q", "k"} & set(wanted)) or "scale" in sources
    needs_scores = needs_ds or "score" in sources  # dS
    of_scores = needs_scores or "sink" in sources
    has_ds = ds is not FLOAT_ONE and needs_ds
    s_of_factors = any("s" in names_in(c.factor, *c.indices) or c.source == "scale" for c in contributions)
    kernels = {
        "scores": True,
        "weights": normalize != "none",
        "weight_gradients": of_scores,
        "delta": of_scores and normalize == "softmax",
        "score_gradients": needs_scores and (normalize != "none" or has_ds),
        "dropout": "v" in wanted and facts.spec.dropout is not None,
        "dq": "q" in wanted,
        "dk": "k" in wanted,
        "dv": "v" in wanted,
        **{gradient_argument(one.name): True for one in captured},
    }
    kept = {
        "S": True,
        "QK": (has_ds and "s" in names_in(ds)) or s_of_factors,
        "dP": of_scores,
        "delta": kernels["delta"],
        "ds": has_ds,
        "sink_weight": "sink" in sources,
    }
    return tuple(n for n, needed in kernels.items() if needed), tuple(n for n, needed in kept.items() if needed)


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    """The only naive plan there is."""
    spec = facts.spec
    kernels, kept = kernels_and_workspaces(facts)
    own = NaiveBackwardPlan(SLICE, -(-max(spec.head_dim, spec.head_dim_v) // 32) * 32, kernels)
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
