"""The loop nest of each schedule as data: what every loop runs over, who runs it, and where its operands lie.

A loop names the line of the emitted file that it stands for by a piece of that line, its `anchor`. `loop_nest` finds the lines,
and fails where one is not there: a nest that no longer describes the file cannot be shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.emit.program import Program
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Loop:
    """One level of a nest. `role`: who runs its iterations, or what they are; `memory`: what it moves or reads, and where."""

    name: str
    range: str
    role: str
    memory: str
    anchor: str
    inner: tuple[Loop, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedLoop:
    """A loop, how deep it lies, and its line of the emitted file, counted from 1."""

    loop: Loop
    depth: int
    line: int


def loop_nest(spec: AttentionSpec, plan: Plan, source: Program) -> tuple[PlacedLoop, ...]:
    """The nests of all kernels of `source`, in the order of their launches, the pre-pass left out."""
    nests = plan.schedule.loops(spec, plan)
    placed: list[PlacedLoop] = []
    for entry in source.kernels:
        suffix = entry.name.removeprefix(f"{spec.name}{plan.suffix}_")
        if suffix in nests:
            blocks = Loop("blocks", str(entry.grid[0]), "block", nests[suffix].memory, f"{entry.name}(", nests[suffix].inner)
            placed += _placed(blocks, source.text.splitlines(), f"{entry.name}(")
    return tuple(placed)


def _placed(nest: Loop, lines: list[str], kernel: str) -> Iterator[PlacedLoop]:
    start = lines.index(kernel)
    end = next((i for i in range(start, len(lines)) if lines[i] == "}"), len(lines))

    def walk(loop: Loop, depth: int, after: int) -> Iterator[PlacedLoop]:
        """A loop stands below the one around it, or in a function above."""
        order = (*range(after, end), *range(after))
        at = next((i for i in order if loop.anchor in lines[i]), None)
        assert at is not None, f"no line of {kernel} has {loop.anchor!r}"
        yield PlacedLoop(loop, depth, at + 1)
        for inner in loop.inner:
            yield from walk(inner, depth + 1, at + 1)

    return walk(nest, 0, start)


def tiles_visited(plan: Plan) -> str:
    """How a loop over tiles of keys is bounded, in words."""
    asked = "not empty" if plan.bounds.per_tile else "kv_begin to kv_end"
    return f"tiles of {plan.block_kv}, {asked}"


def kernel(memory: str, *inner: Loop) -> Loop:
    """What a block does; its name, range and line are those of its entry point."""
    return Loop("", "", "block", memory, "", inner)
