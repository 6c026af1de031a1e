"""What must occur in the problems that a kernel is checked on, beside the parts of its spec: tiles of each class, rows and keys
that do not fill tiles, several batches, heads and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngen.plan import Plan
from attngen.plan.tile_map import EMPTY, FULL, PARTIAL, classify_tiles
from attngen.plan.tiles import KV_LEN, TileBounds
from attngen.reference.alternatives import Alternative
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage
from attngen.spec.expr import Apply, Expr, constant, rewrite, walk
from attngen.spec.operator import FALSE, TRUE, ZERO, add, maximum, minimum


@dataclass(frozen=True, slots=True)
class Circumstance:
    """`by_values`: params and captured tensors may decide whether it occurs, not sizes alone."""

    what: str
    by_values: bool = False

    def __str__(self) -> str:
        return self.what


Goal = Alternative | Circumstance

UNEQUAL = Circumstance("q_len other than kv_len")
BATCHES = Circumstance("several batches")
HEADS = Circumstance("several heads")
GROUPS = Circumstance("several key/value heads, each of several query heads")
RAGGED_ROWS = Circumstance("rows that do not fill the last block")
RAGGED_KEYS = Circumstance("keys that do not fill the last tile")
SEVERAL_TILES = Circumstance("several tiles of keys for one block of rows", by_values=True)
CLASSES = {
    EMPTY: Circumstance("a tile that is skipped: the mask forbids all of its pairs", by_values=True),
    PARTIAL: Circumstance("a tile of which the mask allows some pairs", by_values=True),
    FULL: Circumstance("a tile of which the mask allows all pairs", by_values=True),
}

CLOSED_FORMS = ("kv_begin", "kv_end", "full_begin", "full_end")
MOST_TILES = 4096  # that are classified one by one

# Seconds of the emulated device for a pair of a row and a key, for each element of their Q, K and V, on one core of 2024.
PAIR_SECONDS = {"naive": 28e-9, "tiled": 15e-9, "fused": 12e-9, "wgmma": 7e-9, "hopper": 7e-9}


def wanted_circumstances(spec: AttentionSpec, plan: Plan) -> Iterator[Circumstance]:
    """Those that a check of `plan` should have."""
    yield from (UNEQUAL, BATCHES, HEADS, RAGGED_ROWS, RAGGED_KEYS)
    if spec.q_heads is None:
        yield GROUPS
    if plan.rung != "naive":
        yield SEVERAL_TILES
        yield CLASSES[FULL]
        if spec.mask is not None:
            yield from (CLASSES[EMPTY], CLASSES[PARTIAL])


def circumstances(
    spec: AttentionSpec,
    plan: Plan,
    tile: tuple[int, int],
    sizes: Mapping[str, int],
    params: Mapping[str, int | float],
    problem: Sample,
) -> Iterator[Circumstance]:
    """Those that a problem has; `tile` is rows and keys. Beyond MOST_TILES each class of tile is taken to occur."""
    rows, keys = tile
    groups = sizes["q_heads"] // max(sizes["kv_heads"], 1)
    present = {
        UNEQUAL: sizes["q_len"] != sizes["kv_len"],
        BATCHES: sizes["batch"] > 1,
        HEADS: sizes["q_heads"] > 1,
        GROUPS: sizes["kv_heads"] > 1 and groups > 1,
        RAGGED_ROWS: sizes["q_len"] % rows != 0,
        RAGGED_KEYS: sizes["kv_len"] % keys != 0,
    }
    yield from (what for what, occurs in present.items() if occurs)
    if plan.rung == "naive" or 0 in sizes.values():
        return
    if sizes["q_len"] // rows * (sizes["kv_len"] // keys) > MOST_TILES:
        yield from (SEVERAL_TILES, *CLASSES.values())
        return
    for b, h in {(0, 0), (sizes["batch"] - 1, sizes["q_heads"] - 1)}:
        kinds = _kinds(plan, tile, {**sizes, **params, "b": b, "h": h}, problem)
        yield from (what for kind, what in CLASSES.items() if (kinds == kind).any())
        if ((kinds != EMPTY).sum(axis=1) > 1).any():
            yield SEVERAL_TILES


def seconds(
    spec: AttentionSpec,
    plan: Plan,
    tile: tuple[int, int],
    sizes: Mapping[str, int],
    params: Mapping[str, int | float],
    problem: Sample,
) -> float:
    """About how long the emulated device takes for a problem."""
    if 0 in sizes.values():
        return 0.0
    pairs = sizes["q_len"] * sizes["kv_len"]
    if plan.rung != "naive" and pairs <= MOST_TILES * tile[0] * tile[1]:
        visited = (_kinds(plan, tile, {**sizes, **params, "b": 0, "h": 0}, problem) != EMPTY).sum()
        pairs = int(visited) * tile[0] * tile[1]
    return sizes["batch"] * sizes["q_heads"] * pairs * (spec.head_dim + spec.head_dim_v) * PAIR_SECONDS[plan.rung]


def wrong_bounds(
    plan: Plan,
    tile: tuple[int, int],
    sizes: Mapping[str, int],
    allowed: Mapping[tuple[int, int], Any],
    names: Mapping[str, Any],
    problem: Sample,
) -> Iterator[str]:
    """The changes of the plan's bounds that are wrong on a problem: a tile with an allowed pair is skipped, or one with a
    forbidden pair counts as full.

    `allowed` is the mask [q_len, kv_len] of some heads (b, h); `names` are sizes and params.
    """
    for what, bounds in changed_bounds(plan.bounds):
        inside = {name: maximum(ZERO, minimum(KV_LEN, getattr(bounds, name))) for name in ("kv_begin", "kv_end")}
        moved = replace(plan, bounds=replace(bounds, **inside))  # type: ignore[arg-type]
        for (b, h), mask in allowed.items():
            kinds = _kinds(moved, tile, {**names, "b": b, "h": h}, problem)
            each = np.repeat(np.repeat(kinds, min(tile[0], plan.tile_rows), 0), tile[1], 1)[: sizes["q_len"], : sizes["kv_len"]]
            if ((each == EMPTY) & mask | (each == FULL) & ~mask).any():
                yield what
                break


def changed_bounds(bounds: TileBounds) -> Iterator[tuple[str, TileBounds]]:
    """Each bound as one of its operands, one more and one less, and at the ends of the keys; tests per tile always true."""
    for name in CLOSED_FORMS:
        form = getattr(bounds, name)
        if form is None:
            continue
        others = [*_operands(form), add(form, constant(1)), add(form, constant(-1)), ZERO, KV_LEN]
        for other in dict.fromkeys(others):
            if other is not form:
                yield f"{name} as {other}", replace(bounds, **{name: other})  # type: ignore[arg-type]
    if bounds.per_tile:
        for name, value in (("may", FALSE), ("must", TRUE)):
            yield f"{name} always {value}", replace(bounds, **{name: value})  # type: ignore[arg-type]


def _operands(form: Expr) -> Iterator[Expr]:
    for node in walk(form):
        if isinstance(node, Apply):
            for operand in node.args:
                if operand.type is node.type:
                    swapped: dict[Expr, Expr] = {node: operand}
                    yield rewrite(form, lambda n, swapped=swapped: swapped.get(n))  # type: ignore[misc]


def _kinds(plan: Plan, tile: tuple[int, int], names: Mapping[str, int | float], problem: Sample) -> Any:
    inputs = {name: from_storage(array) for name, array in problem.inputs.items()}
    rows, keys = min(tile[0], plan.tile_rows), tile[1]  # consumers with tiles of their own begin at multiples of their rows
    with np.errstate(all="ignore"):
        return classify_tiles(plan.bounds, rows, keys, names, inputs)
