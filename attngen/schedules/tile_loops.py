"""Loops over tiles and rows that several schedules have."""

from __future__ import annotations

from attngen.emit.loops import Loop, tiles_visited
from attngen.plan.plan import Plan


def tile_loop(plan: Plan, role: str, memory: str, *inner: Loop) -> Loop:
    """The loop over tiles of keys."""
    return Loop("keys", tiles_visited(plan), role, memory, "while (tile < tile_end)", inner)


def softmax_loop(plan: Plan, rows: int, memory: str = "S: registers") -> tuple[Loop, ...]:
    """The loop over a thread's rows in which weights are computed, where these are a softmax."""
    loop = Loop("softmax, rows", str(rows), "thread", memory, "r < ROWS; ++r) {")
    return (loop,) if plan.facts.spec.normalize == "softmax" else ()
