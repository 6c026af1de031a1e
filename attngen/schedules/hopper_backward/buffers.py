"""The shared memory of the kernels of the Hopper backward."""

from __future__ import annotations

from dataclasses import replace

from attngen.diagnostics import counted
from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.shared_memory import COLUMN, SharedBuffer, aligned
from attngen.schedules.hopper_backward.form import (
    CONSUMERS,
    HALVES_KEYS,
    OF_ROWS,
    by_halves,
    dq_of,
    kernels_of,
    pair_slots,
    row_numbers,
    rows_of,
    splits,
    staged,
)
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec

WORK_WORDS = 8  # what tells a work tile: the members of Work, one less if there are no groups
FOUND = 64  # places of tiles that the producer has found
VISIT_WORDS = 2  # what tells a tile to visit: the tile, and its head


def tiles_of(spec: AttentionSpec, name: str, extents: tuple[int, ...], use: str, read: str | None = COLUMN) -> SharedBuffer:
    """Tiles in slabs; `extents` are those before the columns."""
    return slab_tiles(name, spec.dtype.name, extents, use, read=read)


def buffers(facts: SpecFacts, arch: Arch, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block: of either kernel alike, or of each its own where products are split."""
    if by_halves(facts):
        return buffers_of_halves(facts, stages)
    if not splits(facts):
        return buffers_of_both(facts, stages)
    of_keys = buffers_of_keys(facts, stages)
    of_rows = buffers_of_rows(facts, stages, value_stages(facts, arch, stages))
    kernels = kernels_of(facts)
    named = (("dk_dv", "KEYS_", of_keys), ("dq", "ROWS_", of_rows))
    return tuple(
        replace(b, name=prefix + b.name, kernel=k) for k, prefix, all_of_it in named if k in kernels for b in all_of_it
    )


def value_stages(facts: SpecFacts, arch: Arch, stages: int) -> int:
    """As many as fit: values are released before the keys of their tile, and one stage is less of a loss than with keys."""
    return next((n for n in (2, 1) if aligned(*buffers_of_rows(facts, stages, n)) <= arch.shared_per_block), 1)


def buffers_of_keys(facts: SpecFacts, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of keys with split products. A sum goes out over the operand of its consumer alone."""
    spec, rows = facts.spec, WARPGROUP_ROWS
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    numbers = (stages, row_numbers(facts), rows)
    staged = SharedBuffer(name="ROW_NUMBERS", element="float", shape=numbers, use="numbers of the rows of each stage")
    return (
        tiles_of(spec, "HELD_QK", (max(d, dv), rows), "the keys that the block holds, in the end dV"),
        tiles_of(spec, "HELD_V", (max(d, dv), rows), "the values that the block holds, in the end dK"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of Q"),
        tiles_of(spec, "VISITED_V", (stages, dv, rows), f"{stages} tiles of dO"),
        SharedBuffer(name="WEIGHTS", element="float", shape=(stages, rows, rows), use="weights of each stage"),
        *([staged] if OF_ROWS & {*kernels_of(facts)} else []),
        *words(stages, 4 + 4 * stages),
    )


def buffers_of_rows(facts: SpecFacts, stages: int, values: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of the kernel of rows beside such a kernel of keys."""
    spec, rows, held = facts.spec, WARPGROUP_ROWS, CONSUMERS * WARPGROUP_ROWS
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    return (
        tiles_of(spec, "HELD_QK", (d, held), "the rows of Q that the block holds, in the end dQ"),
        tiles_of(spec, "HELD_V", (dv, held), "the rows of dO that the block holds"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of keys"),
        tiles_of(spec, "VISITED_V", (values, dv, rows), f"{counted(values, 'tile')} of values"),
        *words(stages, 4 + 2 * stages + 2 * values),
    )


def words(stages: int, barriers: int, of_stage: int = VISIT_WORDS) -> tuple[SharedBuffer, ...]:
    """What the roles of a block tell each other."""
    count = 2 * WORK_WORDS + VISIT_WORDS * FOUND + of_stage * stages
    use = "two work tiles, the tiles that were found, and that of each stage"
    return (
        SharedBuffer(name="BARRIERS", element="mbarrier", shape=(barriers,), use="see the kernels"),
        SharedBuffer(name="VISITS", element="int", shape=(count,), use=use),
    )


def buffers_of_both(facts: SpecFacts, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of either kernel: what it holds, and stages of the tiles that it visits."""
    spec, rows, adds = facts.spec, rows_of(facts), dq_of(facts) == "additions"
    d, dv, held = slabs(spec.head_dim), slabs(spec.head_dim_v), CONSUMERS * WARPGROUP_ROWS
    numbers = SharedBuffer(
        name="ROW_NUMBERS", element="float", shape=(stages, row_numbers(facts), rows), use="numbers of the rows of each stage"
    )
    return (
        tiles_of(spec, "HELD_QK", (d, held), "the keys that the block holds, or the rows of Q"),
        tiles_of(spec, "HELD_V", (dv, held), "the values that the block holds, or the rows of dO"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of Q, or of keys"),
        tiles_of(spec, "VISITED_V", (stages, dv, rows), f"{stages} tiles of dO, or of values"),
        *([tiles_of(spec, "DS", (stages, CONSUMERS, rows), f"dS of {stages} tiles")] if adds else []),
        *(tiles_of(spec, "PAIRS", (pair_slots(facts), CONSUMERS, rows), f"{e.input} of a tile") for e in staged(facts).pairs),
        tiles_of(
            spec, "OUT", (4 * CONSUMERS, max(d, dv), 16), "rows of a gradient of each warp, on their way to global memory", None
        ),
        *([numbers] if OF_ROWS & {*kernels_of(facts)} and "dk_dv" in kernels_of(facts) else []),
        *words(stages, 4 + (5 if adds else 3) * stages + 2 * pair_slots(facts), VISIT_WORDS + adds),
    )


def buffers_of_halves(facts: SpecFacts, stages: int) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block of keys whose consumers have half of the pairs each. Sums go out over the operands."""
    spec, rows, held = facts.spec, WARPGROUP_ROWS, HALVES_KEYS
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    numbers = (stages, row_numbers(facts), rows)
    return (
        tiles_of(spec, "HELD_QK", (d, held), "the keys that the block holds"),
        tiles_of(spec, "HELD_V", (dv, held), "the values that the block holds"),
        tiles_of(spec, "VISITED_QK", (stages, d, rows), f"{stages} tiles of Q"),
        tiles_of(spec, "VISITED_V", (stages, dv, rows), f"{stages} tiles of dO"),
        tiles_of(spec, "P", (stages, slabs(held), rows), f"P of {stages} tiles, in the end dV, and the beginning of dK"),
        tiles_of(spec, "DS", (stages, slabs(held), rows), f"dS of {stages} tiles, in the end dK"),
        SharedBuffer(name="ROW_NUMBERS", element="float", shape=numbers, use="numbers of the rows of each stage"),
        *words(stages, 4 + 6 * stages, VISIT_WORDS + 1),
    )
