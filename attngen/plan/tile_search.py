"""The tile of a schedule: the first candidate, in order of preference, that fits and was not ruled out; and its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attngen.plan.arch import Arch
from attngen.plan.decisions import WHY_ROTATED
from attngen.plan.facts import SpecFacts
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.own import NONE, Own
from attngen.plan.plan import Decision, Plan, Schedule, origin_of, refusal
from attngen.plan.room import PLENTY, Room
from attngen.plan.shared_memory import SharedBuffer, lay_out
from attngen.plan.tile import Tile
from attngen.spec.attention import AttentionSpec, KernelRequest


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tile takes: shared memory in bytes for a block, registers of a thread, and the threads that a block must have."""

    shared: int
    registers: Room = PLENTY
    threads: int = 1

    def fits(self, arch: Arch, threads: int) -> bool:
        return not self.why_not(arch, threads)

    def why_not(self, arch: Arch, threads: int) -> str:
        """Why it does not fit, in words; empty where it does."""
        if self.shared > arch.shared_per_block:
            return f"needs {kib(self.shared)} of shared memory, and a block of {arch.name} has {kib(arch.shared_per_block)}"
        if lacking := self.registers.lacks(arch, threads):
            return lacking
        if self.threads > threads:
            return f"needs {self.threads} threads, and a block of this tile has {threads}"
        return ""


def kib(size: int) -> str:
    return f"{size / 1024:.1f} KiB".replace(".0 KiB", " KiB")


def pick_tile(
    spec: AttentionSpec, arch: Arch, preferred: Sequence[Tile], possible: Sequence[Tile], cost: Callable[[Tile], Cost]
) -> Tile:
    """The first of `preferred` that fits; with overrides in the spec, the first of `possible` that has them and fits.

    Raises PlanRefusal, with the tiles that would fit, where the overrides do not.
    """
    overrides = {field: value for field, value in _choices(spec.kernel).items() if value is not None}
    matching = [t for t in (*preferred, *(possible if overrides else ())) if _has(t, overrides)]
    for tile in matching:
        if cost(tile).fits(arch, 32 * tile.warps):
            return tile
    assert overrides, (spec.head_dim, spec.head_dim_v, arch.name)
    others = fitting(arch, possible, cost)
    sizes = f"{spec.head_dim}" + (f", v {spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else "")
    wanted = ", ".join(f"{field} {_show(value)}" for field, value in overrides.items())
    why_not = "not among the tiles of this schedule"
    label = cost(matching[0]).why_not(arch, 32 * matching[0].warps) if matching else why_not
    raise refusal(
        "kernel",
        f"{wanted} does not fit {spec.dtype} with head size {sizes} on {arch.name}",
        label,
        f"use {_suggest(others, overrides)}",
    )


def tile_decision(spec: AttentionSpec, tile: Tile, because: str) -> Decision:
    """The tile, and why it was chosen if the spec does not state it."""
    origin = origin_of(spec.kernel.block_q)
    return Decision("BLOCK_Q x BLOCK_KV", f"{tile.block_q} x {tile.block_kv}", "" if origin == "stated" else because, origin)


def planned(
    schedule: Schedule,
    facts: SpecFacts,
    arch: Arch,
    tile: Tile,
    decisions: Sequence[Decision],
    buffers: Sequence[SharedBuffer] = (),
    own: Own = NONE,
    **more: Any,
) -> Plan:
    """The plan of a tile; `own` and `more` are fields of `Plan`, `buffers` are laid out one after another.

    Bounds are those for tiles of this size, which may share spans.
    """
    q, kv = size = tile.block_q, tile.block_kv
    bounds = mask_bounds(facts.spec, size)
    if schedule.visits_rows:
        more["row_bounds"] = mask_bounds(facts.spec, size, "q")
    if schedule.on_tensor_cores and not schedule.packs_heads:
        rule, because = schedule.heads_side_by_side(facts)
        more["heads_in_l2"] = rule
        decisions = (*decisions, Decision("heads numbered together", str(rule), because))
    if facts.spec.rotary is not None:
        more["rotated"] = ("Q", "K")
        decisions = (*decisions, Decision("rotary", "by a kernel before the others", WHY_ROTATED))
    buffers = lay_out(*buffers)
    return Plan(schedule, facts, arch, q, kv, tile.warps, tile.stages, bounds, tuple(decisions), buffers, own, **more)


def fitting(arch: Arch, tiles: Sequence[Tile], cost: Callable[[Tile], Cost]) -> tuple[Tile, ...]:
    """Those of `tiles` that fit, each once."""
    return tuple(t for t in dict.fromkeys(tiles) if cost(t).fits(arch, 32 * t.warps))


def _choices(of: Tile | KernelRequest) -> dict[str, object]:
    """What a `kernel` statement may state of a tile, by its fields; None: it does not."""
    tile = (of.block_q, of.block_kv) if of.block_q and of.block_kv else None
    return {"tile": tile, "stages": of.stages, "warps": of.warps}


def _has(tile: Tile, overrides: dict[str, object]) -> bool:
    return overrides.items() <= _choices(tile).items()


def _show(value: object) -> str:
    return f"{value[0]} x {value[1]}" if isinstance(value, tuple) else str(value)


def _suggest(those_that_fit: Sequence[Tile], overrides: dict[str, object]) -> str:
    """The choices of the first overridden field that fit, with the other overrides kept where that leaves any."""
    for field in overrides:
        others = {f: v for f, v in overrides.items() if f != field}
        tiles = [t for t in those_that_fit if _has(t, others)]
        if values := dict.fromkeys(_show(_choices(t)[field]) for t in tiles):
            return f"{field} {', '.join(values)}"
    return ", ".join(dict.fromkeys(f"tile {t.block_q} x {t.block_kv}" for t in those_that_fit))
