"""spec + architecture -> Plan. One proposer per schedule; a new schedule is one more row of SCHEDULES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.plan import fused_mma, fused_simt, hopper, naive, tiled, wgmma
from attngen.plan.arch import DEFAULT_ARCH, Arch
from attngen.plan.plan import Plan
from attngen.plan.problem import Problem
from attngen.plan.tiling import Tile
from attngen.spec.attention import HOPPER_RUNGS, RUNGS, AttentionSpec, Rung, Schedule

Proposer = Callable[[AttentionSpec, Arch, Problem | None], Plan]
Tiles = Callable[[AttentionSpec, Arch], tuple[Tile, ...]]
Suits = Callable[[AttentionSpec, Arch], bool]


def _of_any_size(propose: Callable[[AttentionSpec, Arch], Plan]) -> Proposer:
    return lambda spec, arch, problem: propose(spec, arch)


# In order of preference within a rung: (name, rung, whether it can take the spec on the architecture, proposer).
SCHEDULES: tuple[tuple[str, str, Suits, Proposer], ...] = (
    ("naive", "naive", lambda spec, arch: True, _of_any_size(naive.propose)),
    ("tiled", "tiled", lambda spec, arch: True, _of_any_size(tiled.propose)),
    ("fused_mma", "fused", fused_mma.suits, _of_any_size(fused_mma.propose)),
    ("fused_simt", "fused", lambda spec, arch: True, _of_any_size(fused_simt.propose)),
    ("wgmma", "wgmma", lambda spec, arch: True, _of_any_size(wgmma.propose)),  # this one and the next
    ("hopper", "hopper", lambda spec, arch: True, hopper.propose),  # refuse by themselves what they cannot take
)


TILES: dict[str, Tiles] = {
    "fused_mma": fused_mma.tiles,
    "fused_simt": fused_simt.tiles,
    "wgmma": wgmma.tiles,
    "hopper": hopper.tiles,
}


def candidates(spec: AttentionSpec, arch: Arch, rung: Rung = "fused") -> tuple[Schedule, ...]:
    """What a fused rung could be asked for on `arch`, by the plan's own model of registers and shared memory."""
    name = next(name for name, of_rung, suits, _ in SCHEDULES if of_rung == rung and suits(spec, arch))
    return tuple(Schedule(rung, t.block_q, t.block_kv, t.stages, t.warps) for t in TILES[name](spec, arch))


def automatic(spec: AttentionSpec, arch: Arch) -> Rung:
    """What "auto" stands for: the least work and O(S) memory, by the instructions that `arch` has for the spec."""
    return "hopper" if hopper.suits(spec, arch) else "fused"


def default_arch(rung: str | None) -> str:
    """The architecture to plan for where none is named: that of the most GPUs, or the one that has the rungs of Hopper."""
    return "sm_90a" if rung in HOPPER_RUNGS else DEFAULT_ARCH


def rungs_for(spec: AttentionSpec, arch: Arch) -> tuple[Rung, ...]:
    """Every rung that the spec can have on `arch`."""
    return (*RUNGS, *HOPPER_RUNGS) if hopper.suits(spec, arch) else RUNGS


def choose(spec: AttentionSpec, arch: Arch, rung: str | None = None, problem: Problem | None = None) -> Plan:
    """The plan for `spec` on `arch`, and for the sizes of `problem` where these are known. `rung` overrides the spec's own
    `kernel` statement (`Schedule.overridden`); "auto" is `automatic`.

    Raises PlanRefusal where an override of the spec does not fit, or the architecture lacks what the rung needs.
    """
    spec = replace(spec, schedule=spec.schedule.overridden(rung))
    wanted = automatic(spec, arch) if spec.schedule.rung == "auto" else spec.schedule.rung
    for _, of_rung, suits, propose in SCHEDULES:
        if of_rung == wanted and suits(spec, arch):
            return _with_ranges_shared(propose(spec, arch, problem))
    raise AssertionError(wanted)


def _with_ranges_shared(plan: Plan) -> Plan:
    """`plan`, with one pre-pass for the ranges of rows and of keys where tiles of rows are whole ones of keys."""
    return replace(plan, bounds=plan.bounds.ranged_once(plan.block_q, plan.block_kv))


def plans_for(spec: AttentionSpec, arch: Arch, rung: str | None = None) -> tuple[Plan, ...]:
    """Every plan that `choose` may give for `spec`, whatever the sizes of a call."""
    usual = choose(spec, arch, rung)
    if not depends_on_sizes(spec, usual):
        return (usual,)
    by_lengths = (_with_ranges_shared(plan) for plan in hopper.proposals(spec, arch))
    return usual, *(p for p in by_lengths if (p.block_q, p.block_kv) != (usual.block_q, usual.block_kv))


def depends_on_sizes(spec: AttentionSpec, plan: Plan) -> bool:
    """Whether `choose` may give another plan than `plan`, which it gave for `spec`, once the sizes of a call are known."""
    return plan.rung == "hopper" and hopper.depends_on_lengths(spec)
