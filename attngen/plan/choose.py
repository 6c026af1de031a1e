"""spec + architecture -> Plan. One proposer per schedule; a new schedule is one more row of SCHEDULES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from attngen.plan import fused_mma, fused_simt, hopper, naive, tiled, wgmma
from attngen.plan.arch import DEFAULT_ARCH, Arch
from attngen.plan.facts import fact
from attngen.plan.plan import Plan
from attngen.plan.problem import Problem
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Tile
from attngen.spec.attention import HOPPER_RUNGS, RUNGS, AttentionSpec, Rung, Schedule

Proposer = Callable[[AttentionSpec, Arch], Plan]
Tiles = Callable[[AttentionSpec, Arch], tuple[Tile, ...]]
Suits = Callable[[AttentionSpec, Arch], bool]


# In order of preference within a rung: (name, rung, whether it can take the spec on the architecture, proposer).
SCHEDULES: tuple[tuple[str, str, Suits, Proposer], ...] = (
    ("naive", "naive", lambda spec, arch: True, naive.propose),
    ("tiled", "tiled", lambda spec, arch: True, tiled.propose),
    ("fused_mma", "fused", fused_mma.suits, fused_mma.propose),
    ("fused_simt", "fused", lambda spec, arch: True, fused_simt.propose),
    ("wgmma", "wgmma", lambda spec, arch: True, wgmma.propose),  # this one and the next
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


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What was chosen for a spec on an architecture: one plan for all sizes, or one of several by the sizes of a call."""

    spec: AttentionSpec
    usual: Plan  # if the sizes are unknown
    by_lengths: hopper.ByLengths | None  # None: `usual` is for all sizes

    def at(self, problem: Problem) -> Plan:
        """The plan for these sizes. Sizes that were not seen before cost a comparison of a few tiles, whose plans are made
        once."""
        return self.usual if self.by_lengths is None else _at(self, problem)


def choose(spec: AttentionSpec, arch: Arch, rung: str | None = None, problem: Problem | None = None) -> Plan:
    """The plan for `spec` on `arch`, and for the sizes of `problem` where these are known. `rung` overrides the spec's own
    `kernel` statement (`Schedule.overridden`); "auto" is `automatic`.

    Raises PlanRefusal where an override of the spec does not fit, or the architecture lacks what the rung needs.
    """
    choice = choice_of(spec, arch, rung)
    return choice.usual if problem is None else choice.at(problem)


@fact
def choice_of(spec: AttentionSpec, arch: Arch, rung: str | None = None) -> Choice:
    """All of `choose` that does not depend on sizes. Raises PlanRefusal."""
    spec = replace(spec, schedule=spec.schedule.overridden(rung))
    wanted = automatic(spec, arch) if spec.schedule.rung == "auto" else spec.schedule.rung
    for _, of_rung, suits, propose in SCHEDULES:
        if of_rung == wanted and suits(spec, arch):
            plan = _for_its_tiles(spec, propose(spec, arch))
            return Choice(spec, plan, hopper.by_lengths(spec) if plan.rung == "hopper" else None)
    raise AssertionError(wanted)


@lru_cache(maxsize=4096)
def _at(choice: Choice, problem: Problem) -> Plan:
    assert choice.by_lengths is not None
    return _of_tile(choice.spec, choice.usual.arch, choice.by_lengths.fastest(problem))


@fact
def _of_tile(spec: AttentionSpec, arch: Arch, tile: Tile) -> Plan:
    return _for_its_tiles(spec, hopper.propose_for_lengths(spec, arch, tile))


def _for_its_tiles(spec: AttentionSpec, plan: Plan) -> Plan:
    """`plan`, with a classification for the size of its tiles, and one pre-pass for the ranges of rows and of keys if tiles of
    rows are whole ones of keys."""
    tile = plan.block_q, plan.block_kv
    return replace(plan, bounds=tile_bounds(spec, tile).ranged_once(*tile))


def plans_for(spec: AttentionSpec, arch: Arch, rung: str | None = None) -> tuple[Plan, ...]:
    """Every plan that `choose` may give for `spec`, whatever the sizes of a call."""
    choice = choice_of(spec, arch, rung)
    usual, tiles = choice.usual, choice.by_lengths.paces if choice.by_lengths else ()
    plans = (_of_tile(choice.spec, arch, pace.tile) for pace, _ in tiles)
    return usual, *(p for p in plans if (p.block_q, p.block_kv) != (usual.block_q, usual.block_kv))


def depends_on_sizes(spec: AttentionSpec, plan: Plan) -> bool:
    """Whether `choose` may give another plan than `plan`, which it gave for `spec`, once the sizes of a call are known."""
    return plan.rung == "hopper" and hopper.depends_on_lengths(spec)
