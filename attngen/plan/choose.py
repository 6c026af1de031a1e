"""spec + architecture -> Plan. One proposer per schedule; a new schedule is one more row of SCHEDULES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.plan import fused_mma, fused_simt, hopper, naive, tiled
from attngen.plan.arch import DEFAULT_ARCH, Arch
from attngen.plan.plan import Plan
from attngen.plan.tiling import Tile
from attngen.spec.attention import RUNGS, AttentionSpec, Rung, Schedule

Proposer = Callable[[AttentionSpec, Arch], Plan]
Tiles = Callable[[AttentionSpec, Arch], tuple[Tile, ...]]
Suits = Callable[[AttentionSpec, Arch], bool]

# In order of preference within a rung: (name, rung, whether it can take the spec on the architecture, proposer).
SCHEDULES: tuple[tuple[str, str, Suits, Proposer], ...] = (
    ("naive", "naive", lambda spec, arch: True, naive.propose),
    ("tiled", "tiled", lambda spec, arch: True, tiled.propose),
    ("fused_mma", "fused", fused_mma.suits, fused_mma.propose),
    ("fused_simt", "fused", lambda spec, arch: True, fused_simt.propose),
    ("hopper", "hopper", lambda spec, arch: True, hopper.propose),  # refuses by itself what it cannot take
)


TILES: dict[str, Tiles] = {"fused_mma": fused_mma.tiles, "fused_simt": fused_simt.tiles, "hopper": hopper.tiles}


def candidates(spec: AttentionSpec, arch: Arch, rung: Rung = "fused") -> tuple[Schedule, ...]:
    """What a fused rung could be asked for on `arch`, by the plan's own model of registers and shared memory."""
    name = next(name for name, of_rung, suits, _ in SCHEDULES if of_rung == rung and suits(spec, arch))
    return tuple(Schedule(rung, t.block_q, t.block_kv, t.stages, t.warps) for t in TILES[name](spec, arch))


AUTOMATIC: Rung = "fused"  # what "auto" stands for: the least work and O(S) memory, for every spec of the language


def default_arch(rung: str | None) -> str:
    """The architecture to plan for where none is named: that of the most GPUs, and for the hopper rung the one that has it."""
    return "sm_90a" if rung == "hopper" else DEFAULT_ARCH


def rungs_for(spec: AttentionSpec, arch: Arch) -> tuple[Rung, ...]:
    """Every rung that the spec can have on `arch`."""
    return (*RUNGS, "hopper") if hopper.suits(spec, arch) else RUNGS


def choose(spec: AttentionSpec, arch: Arch, rung: str | None = None) -> Plan:
    """The plan for `spec` on `arch`. `rung` overrides the spec's own `kernel` statement, whose tile, stages and warps are
    for its own rung only; "auto" is AUTOMATIC.

    Raises PlanRefusal where an override of the spec does not fit, or the architecture lacks what the rung needs.
    """
    stated = AUTOMATIC if spec.schedule.rung == "auto" else spec.schedule.rung
    wanted = stated if rung is None else AUTOMATIC if rung == "auto" else rung
    if wanted != stated:  # tile, stages and warps were said of another rung
        spec = replace(spec, schedule=Schedule())
    for _, of_rung, suits, propose in SCHEDULES:
        if of_rung == wanted and suits(spec, arch):
            return propose(spec, arch)
    raise AssertionError(wanted)
