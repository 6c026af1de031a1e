"""Choosing the tile of a schedule: the first candidate, in order of preference, that fits and was not ruled out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.plan import refusal
from attngen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Tile:
    """A candidate: rows, keys, stages and warps of a block."""

    block_q: int
    block_kv: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tile takes: shared memory in bytes for a block, registers for a thread (an estimate of what must be live).

    `have` is the limit if threads have different numbers of registers; None: the registers of an SM, shared evenly.
    """

    shared: int
    registers: int
    have: int | None = None

    def fits(self, arch: Arch, threads: int) -> bool:
        return not self.why_not(arch, threads)

    def why_not(self, arch: Arch, threads: int) -> str:
        """Why it does not fit, in words; empty where it does."""
        if self.shared > arch.shared_per_block:
            return f"needs {kib(self.shared)} of shared memory, and a block of {arch.name} has {kib(arch.shared_per_block)}"
        limit = self.have or min(arch.max_registers_per_thread, arch.registers_per_sm // threads)
        if self.registers > limit:
            return f"needs about {self.registers} registers a thread; the limit is {limit}"
        return ""


def kib(size: int) -> str:
    return f"{size / 1024:.1f} KiB".replace(".0 KiB", " KiB")


def pick_tile(
    spec: AttentionSpec, arch: Arch, preferred: Sequence[Tile], possible: Sequence[Tile], cost: Callable[[Tile], Cost]
) -> Tile:
    """The first of `preferred` that fits; with overrides in the spec, the first of `possible` that has them and fits.

    Raises PlanRefusal, with the tiles that would fit, where the overrides do not.
    """
    asked = spec.schedule
    overrides: dict[str, object] = {
        "tile": (asked.block_q, asked.block_kv) if asked.block_q and asked.block_kv else None,
        "stages": asked.stages,
        "warps": asked.warps,
    }
    overrides = {field: value for field, value in overrides.items() if value is not None}
    if not overrides:
        for tile in preferred:
            if cost(tile).fits(arch, 32 * tile.warps):
                return tile
        raise AssertionError((spec.head_dim, spec.head_dim_v, arch.name))
    matching = [t for t in (*preferred, *possible) if _has(t, overrides)]
    for tile in matching:
        if cost(tile).fits(arch, 32 * tile.warps):
            return tile
    others = fitting(arch, possible, cost)
    wanted = ", ".join(f"{field} {_show(value)}" for field, value in overrides.items())
    why_not = "not among the tiles of this schedule"
    label = cost(matching[0]).why_not(arch, 32 * matching[0].warps) if matching else why_not
    raise refusal(
        "kernel",
        f"{wanted} does not fit {spec.dtype} with head size {_show_head(spec)} on {arch.name}",
        label,
        f"use {_suggest(others, overrides)}",
    )


def fitting(arch: Arch, tiles: Sequence[Tile], cost: Callable[[Tile], Cost]) -> tuple[Tile, ...]:
    """Those of `tiles` that fit, each once."""
    return tuple(t for t in dict.fromkeys(tiles) if cost(t).fits(arch, 32 * t.warps))


def _has(tile: Tile, overrides: dict[str, object]) -> bool:
    have = {"tile": (tile.block_q, tile.block_kv), "stages": tile.stages, "warps": tile.warps}
    return all(have[field] == value for field, value in overrides.items())


def _show(value: object) -> str:
    return f"{value[0]} x {value[1]}" if isinstance(value, tuple) else str(value)


def _show_head(spec: AttentionSpec) -> str:
    return str(spec.head_dim) if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}, v {spec.head_dim_v}"


def _suggest(those_that_fit: Sequence[Tile], overrides: dict[str, object]) -> str:
    """The choices of the first overridden field that fit, with the other overrides kept where that leaves any."""
    for field in overrides:
        others = {f: v for f, v in overrides.items() if f != field}
        tiles = [t for t in those_that_fit if _has(t, others)]
        values = dict.fromkeys(
            {"tile": f"{t.block_q} x {t.block_kv}", "stages": str(t.stages), "warps": str(t.warps)}[field] for t in tiles
        )
        if values:
            return f"{field} {', '.join(values)}"
    return ", ".join(dict.fromkeys(f"tile {t.block_q} x {t.block_kv}" for t in those_that_fit))
