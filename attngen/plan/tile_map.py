"""The classification of every tile of one problem: what the kernels decide, evaluated here on numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attngen.plan.tiles import Q_HI, Q_LO, Span, TileBounds
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr

EMPTY, PARTIAL, FULL = 0, 1, 2
Array = np.ndarray[Any, Any]


def classify_tiles(
    bounds: TileBounds,
    block_q: int,
    block_kv: int,
    names: Mapping[str, int | float],
    inputs: Mapping[str, Array] | None = None,
    missing: int = 0,
) -> Array:
    """EMPTY, PARTIAL or FULL for each tile [q block, kv tile] of one batch and head.

    `names` gives b, h, sizes and params; `inputs` the captured tensors as numpy arrays of their declared shapes. The first
    block lacks `missing` rows.
    """
    q_len, kv_len = int(names["q_len"]), int(names["kv_len"])
    q_blocks, kv_tiles = -(-q_len // block_q), -(-kv_len // block_kv)
    reader = _Reader(dict(inputs or {}), bounds.spans, {"q": block_q, "k": block_kv, "qk": block_kv})
    kinds = np.full((q_blocks, kv_tiles), EMPTY)
    for block in range(q_blocks):
        first = block * block_q - missing
        row = {**names, "q.lo": max(first, 0), "q.hi": min(first + block_q, q_len) - 1, "q.tile": block}

        def value(expr: Expr, at: dict[str, Any]) -> int:
            return int(evaluate(expr, at, reader, np))

        begin, end = value(bounds.kv_begin, row), value(bounds.kv_end, row)
        full = None
        if bounds.full_begin is not None and bounds.full_end is not None:
            full = value(bounds.full_begin, row), value(bounds.full_end, row)
        for tile in range(begin // block_kv, -(-end // block_kv)):
            low, high = tile * block_kv, min((tile + 1) * block_kv, kv_len) - 1
            whole = (tile + 1) * block_kv <= kv_len
            if full is not None:
                is_full = full[0] <= low and high < full[1]
                kinds[block, tile] = FULL if whole and is_full else PARTIAL
                continue
            at = {**row, "k.lo": low, "k.hi": high, "k.tile": tile}
            if value(bounds.must, at) and whole:
                kinds[block, tile] = FULL
            elif value(bounds.may, at):
                kinds[block, tile] = PARTIAL
    return kinds


def upper_ends(
    bounds: TileBounds, block_q: int, block_kv: int, names: Mapping[str, int | float], inputs: Mapping[str, Array]
) -> tuple[int, ...]:
    """Of each block whose last tile may be for the lower half of its rows alone: where the tiles of all rows end.
    `names` and `inputs` as `classify_tiles` has them."""
    hull = _hull(bounds, names, inputs)

    def end(first: int, rows: int) -> int:
        return -(-hull(first, first + rows - 1)[1] // block_kv)

    starts = range(0, int(names["q_len"]), block_q)
    return tuple(max(end(first, block_q // 2), end(first, block_q) - 1) for first in starts)


def staggered_steps(
    bounds: TileBounds, block_q: int, block_kv: int, names: Mapping[str, int | float], inputs: Mapping[str, Array]
) -> tuple[tuple[int, int], ...]:
    """Of each block whose two halves of rows have tiles of their own: the upper half's first tile, and where its steps end.
    `names` and `inputs` as `classify_tiles` has them."""
    hull = _hull(bounds, names, inputs)

    def steps(first: int) -> tuple[int, int]:
        last = first + block_q - 1
        upper, upper_end = hull(first, first + block_q // 2 - 1)
        lower, lower_end = hull(first + block_q // 2, last)
        tile = min(upper, lower) // block_kv
        lead = min(lower // block_kv - tile, 1)
        return tile, max(-(-upper_end // block_kv), -(-lower_end // block_kv) - lead)

    return tuple(steps(first) for first in range(0, int(names["q_len"]), block_q))


def _hull(
    bounds: TileBounds, names: Mapping[str, int | float], inputs: Mapping[str, Array]
) -> Callable[[int, int], tuple[int, int]]:
    """Of a first and a last row, both as far as there are rows: outside which keys none of them sees any."""
    last_row = int(names["q_len"]) - 1
    reader = _Reader(dict(inputs), (), {})

    def of(first: int, last: int) -> tuple[int, int]:
        at = {**names, Q_LO.name: min(first, last_row), Q_HI.name: min(last, last_row)}
        begin, end = (int(evaluate(form, at, reader, np)) for form in (bounds.kv_begin, bounds.kv_end))
        return begin, end

    return of


class _Reader:
    """Reads captured tensors, and the tile ranges that the pre-pass would have written."""

    def __init__(self, inputs: dict[str, Array], spans: tuple[Span, ...], blocks: dict[str, int]) -> None:
        self.arrays = dict(inputs)
        for span in spans:
            moved = np.moveaxis(inputs[span.input], span.axis, -1)
            starts = np.arange(0, moved.shape[-1], blocks[span.index])
            self.arrays[f"{span.name}.min"] = np.minimum.reduceat(moved, starts, axis=-1)
            self.arrays[f"{span.name}.max"] = np.maximum.reduceat(moved, starts, axis=-1)

    def __call__(self, name: str, indices: tuple[Any, ...]) -> Any:
        array = self.arrays[name]
        return array[tuple(0 if size == 1 else i for i, size in zip(indices, array.shape, strict=True))]
