"""What must occur in the problems that a kernel is checked on, beside the parts of its spec: tiles of each class, rows and keys
that do not fill tiles, several batches, heads and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngen.plan import Plan
from attngen.plan.axes import KEYS
from attngen.plan.block_map import EMPTY, FULL, PARTIAL, classify_tiles
from attngen.plan.bounded_scores import RESCALE_EXPONENT
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.alternatives import Alternative
from attngen.reference.definition import allowed_rows, score_rows
from attngen.reference.numpy_oracle import numbers_of
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
RISES = Circumstance("a row whose maximum rises so far after its first tile that its sums are rescaled", by_values=True)
JOINS = Circumstance("a row whose keys lie in several splits, which are joined", by_values=True)
CLASSES = {
    EMPTY: Circumstance("a tile that is skipped: the mask forbids all of its pairs", by_values=True),
    PARTIAL: Circumstance("a tile of which the mask allows some pairs", by_values=True),
    FULL: Circumstance("a tile of which the mask allows all pairs", by_values=True),
}

CLOSED_FORMS = ("begin", "end", "full_begin", "full_end")
MOST_TILES = 4096  # that are classified one by one
MOST_PAIRS = 2**18  # whose scores are computed

# Seconds of the emulated device for a pair of a row and a key, for each element of their Q, K and V, on one core of 2024.
PAIR_SECONDS = {"naive": 28e-9, "tiled": 15e-9, "fused": 12e-9, "wgmma": 7e-9, "hopper": 7e-9, "decode": 14e-9}


def wanted_circumstances(spec: AttentionSpec, plan: Plan) -> Iterator[Circumstance]:
    """Those that a check of `plan` should have."""
    yield from (UNEQUAL, BATCHES, HEADS, RAGGED_ROWS, RAGGED_KEYS)
    if spec.q_heads is None:
        yield GROUPS
    if plan.schedule.is_tiled:
        yield SEVERAL_TILES
        yield CLASSES[FULL]
        if spec.mask is not None:
            yield from (CLASSES[EMPTY], CLASSES[PARTIAL])


def rescales(plan: Plan) -> bool:
    """Whether kernels of `plan` multiply sums of earlier tiles when the maximum of a row rises."""
    return plan.schedule.is_fused and not plan.wanted and plan.facts.spec.normalize == "softmax" and plan.facts.shift is None


@dataclass(frozen=True, slots=True)
class Case:
    """One problem for a plan; `tile` is rows and keys."""

    spec: AttentionSpec
    plan: Plan
    tile: tuple[int, int]
    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    problem: Sample
    multiprocessors: int = 0  # of the emulated device, if they are not the usual ones

    def kinds(self, b: int, h: int, bounds: MaskBounds | None = None) -> Any:
        """The kinds of the tiles of one head, by the plan's bounds or by others."""
        inputs = {name: from_storage(array) for name, array in self.problem.inputs.items()}
        rows = min(self.tile[0], self.plan.tile_rows)  # consumers with tiles of their own begin at multiples of their rows
        names = {**self.sizes, **self.params, "b": b, "h": h}
        with np.errstate(all="ignore"):
            return classify_tiles(bounds or self.plan.bounds, rows, self.tile[1], names, inputs)


def circumstances(case: Case) -> Iterator[Circumstance]:
    """Those that a problem has. Beyond MOST_TILES each class of tile is taken to occur."""
    (rows, keys), sizes = case.tile, case.sizes
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
    if not case.plan.schedule.is_tiled or 0 in sizes.values():
        return
    if sizes["q_len"] // rows * (sizes["kv_len"] // keys) > MOST_TILES:
        yield from (SEVERAL_TILES, *CLASSES.values())
        return
    for b, h in {(0, 0), (sizes["batch"] - 1, sizes["q_heads"] - 1)}:
        kinds = case.kinds(b, h)
        yield from (what for kind, what in CLASSES.items() if (kinds == kind).any())
        if ((kinds != EMPTY).sum(axis=1) > 1).any():
            yield SEVERAL_TILES


def rises(case: Case) -> bool:
    """Whether the first head has a row of RISES if its tiles are visited from the first one on, and one if from the last one
    on."""
    if 0 in case.sizes.values():
        return False
    step = _splits(case) * case.plan.tile.warps if case.plan.schedule.packs_heads else 1
    visited = _of_tiles(case, _first_scores(case), -np.inf)[::step]
    return len(visited) > 1 and _rise(visited) and _rise(visited[::-1])


def joins(case: Case) -> bool:
    """Whether the first head has a row of JOINS."""
    if 0 in case.sizes.values() or (splits := _splits(case)) == 1:
        return False
    has_keys, warps = _of_tiles(case, _first_scores(case) > -np.inf, False), case.plan.tile.warps
    # The warps of a split have neighbouring tiles: these distances lead to another split, wherever the first tile is
    return any((has_keys[:-n] & has_keys[n:]).any() for n in range(warps, warps * (splits - 1) + 1))


def _first_scores(case: Case) -> Any:
    """The scores of the first rows of the first head, -inf where the mask forbids the pair: [rows, keys]."""
    numbers = numbers_of(case.spec, case.problem, case.params, np.float32)
    rows = slice(0, min(case.sizes["q_len"], MOST_PAIRS // max(case.sizes["kv_len"], 1)))
    with np.errstate(all="ignore"):
        scores = np.asarray(score_rows(numbers, 0, 0, rows))
        return scores if case.spec.mask is None else np.where(allowed_rows(numbers, 0, 0, rows), scores, -np.inf)


def _of_tiles(case: Case, numbers: Any, least: float) -> Any:
    """The largest of each row's numbers in each tile of keys, [tiles, rows], of [rows, keys]."""
    starts = range(0, numbers.shape[1], case.tile[1])
    return np.array([numbers[:, i : i + case.tile[1]].max(1, initial=least) for i in starts])


def _splits(case: Case) -> int:
    """The number of blocks over which decode splits the keys of a row on the emulated device."""
    from attngen.device.emulated.device import MULTIPROCESSORS  # imported late: a check on a GPU needs it for `decode` alone

    number: int = case.plan.own.splits({**case.sizes, "multiprocessors": case.multiprocessors or MULTIPROCESSORS})
    return number


def _rise(maxima: Any) -> bool:
    """Whether a row's maximum of a tile exceeds those of the tiles before by RESCALE_EXPONENT powers of 2; [tiles, rows]."""
    before = np.maximum.accumulate(maxima)[:-1]
    with np.errstate(invalid="ignore"):  # of tiles without pairs
        return bool(((maxima[1:] - before)[np.isfinite(before)] * np.log2(np.e) > RESCALE_EXPONENT).any())


def seconds(case: Case) -> float:
    """About how long the emulated device takes for a problem."""
    sizes, area = case.sizes, case.tile[0] * case.tile[1]
    if 0 in sizes.values():
        return 0.0
    pairs = sizes["q_len"] * sizes["kv_len"]
    if case.plan.schedule.is_tiled and pairs <= MOST_TILES * area:
        pairs = int((case.kinds(0, 0) != EMPTY).sum()) * area
    columns = case.spec.head_dim + case.spec.head_dim_v
    return sizes["batch"] * sizes["q_heads"] * pairs * columns * PAIR_SECONDS[case.plan.keyword]


def wrong_pairs(case: Case, allowed: Mapping[tuple[int, int], Any]) -> Iterator[tuple[str, tuple[int, int], Any]]:
    """The changes of the plan's bounds that are wrong on a problem, each with a head (b, h) and the pairs [q_len, kv_len] that
    its kernel computes there: a tile with an allowed pair is skipped, or one with a forbidden pair counts as full. `allowed` is
    the mask [q_len, kv_len] of some heads.
    """
    (rows, keys), q_len, kv_len = case.tile, case.sizes["q_len"], case.sizes["kv_len"]
    for what, bounds in changed_bounds(case.plan.bounds):
        inside = {name: maximum(ZERO, minimum(KEYS.length, getattr(bounds, name))) for name in ("begin", "end")}
        moved = replace(bounds, **inside)  # type: ignore[arg-type]
        for (b, h), mask in allowed.items():
            kinds = case.kinds(b, h, moved)
            each = np.repeat(np.repeat(kinds, min(rows, case.plan.tile_rows), 0), keys, 1)[:q_len, :kv_len]
            computed = (each == FULL) | (each == PARTIAL) & mask
            if (computed != mask).any():
                yield what, (b, h), computed


def changed_bounds(bounds: MaskBounds) -> Iterator[tuple[str, MaskBounds]]:
    """Each bound as one of its operands, one more and one less, and at the ends of the keys; tests per tile always true."""
    for name in CLOSED_FORMS:
        form = getattr(bounds, name)
        if form is None:
            continue
        others = [*_operands(form), add(form, constant(1)), add(form, constant(-1)), ZERO, KEYS.length]
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
