"""The classification of every tile of one problem: what the kernels decide, evaluated here on numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attngen.plan.axes import KEYS, ROWS
from attngen.plan.mask_bounds import MaskBounds
from attngen.plan.spans import Span
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr

EMPTY, PARTIAL, FULL = 0, 1, 2
AT_ONCE = 2**18  # tiles whose bounds are evaluated together
KIND_NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
Array = np.ndarray


def classify_tiles(
    bounds: MaskBounds,
    block_q: int,
    block_kv: int,
    names: Mapping[str, int | float],
    inputs: Mapping[str, Array] | None = None,
    missing: int = 0,
    of_ranges: int = 0,
) -> Array:
    """EMPTY, PARTIAL or FULL for each tile of one batch and head: [blocks of rows, tiles of keys]; by bounds that are solved
    for rows [blocks of keys, tiles of rows].

    A tile that reaches past the last of its keys (of its rows) is never FULL. `names` gives b, h, sizes and params; `inputs`
    the captured tensors as numpy arrays of their declared shapes. The first block lacks `missing` indices. Stored ranges of
    captured vectors are of the indices of a block, or of `of_ranges` indices, of which a block has some.
    """
    axis, of_blocks = bounds.axis, bounds.axis.other
    lengths = {ROWS.index: block_q, KEYS.index: block_kv}
    size, block_size = lengths[axis.index], lengths[of_blocks.index]
    length, block_length = int(names[axis.length.name]), int(names[of_blocks.length.name])
    of_ranges = of_ranges or block_size
    read = _Reader(dict(inputs or {}), bounds.spans, lengths | {of_blocks.index: of_ranges, "qk": size})
    tiles = np.arange(-(-length // size))
    low, after = tiles * size, (tiles + 1) * size
    whole = after <= length
    at = {**names, axis.tile.name: tiles, axis.lo.name: low, axis.hi.name: np.minimum(after, length) - 1}

    def value(expr: Expr) -> Array:
        found: Array = evaluate(expr, at, read, np)
        return found

    blocks = np.arange(-(-block_length // block_size))[:, None]
    kinds = np.full((len(blocks), len(tiles)), EMPTY, np.int8)
    first = blocks * block_size - missing
    last = np.minimum(first + block_size, block_length) - 1
    at_once = max(AT_ONCE // max(len(tiles), 1), 1)
    for some_blocks in (slice(n, n + at_once) for n in range(0, len(blocks), at_once)):
        begin = np.maximum(first[some_blocks], 0)
        tile = blocks[some_blocks] if of_ranges == block_size else begin // of_ranges
        of_blocks_at = (tile, begin, last[some_blocks])
        at |= dict(zip((of_blocks.tile.name, of_blocks.lo.name, of_blocks.hi.name), of_blocks_at, strict=True))
        found = kinds[some_blocks]
        visited = (value(bounds.begin) // size <= tiles) & (tiles < -(-value(bounds.end) // size))
        some: Array | bool = True
        if bounds.full_begin is None or bounds.full_end is None:
            some, every = value(bounds.may), value(bounds.must)
        else:
            every = (value(bounds.full_begin) <= low) & (after <= value(bounds.full_end))
        found[np.broadcast_to(visited & some, found.shape)] = PARTIAL
        found[np.broadcast_to(visited & every & whole, found.shape)] = FULL
    return kinds


def extents(length: int, block: int) -> Array:
    """The number of indices of each block."""
    starts = np.arange(0, length, block)
    return np.minimum(starts + block, length) - starts


def pairs_in(chosen: Array, rows: Array, keys: Array) -> int:
    """The pairs in chosen tiles [blocks of rows, tiles of keys]; `rows`, `keys`: extents, of all but the last the same."""
    if not chosen.size:
        return 0
    of_rows = np.count_nonzero(chosen, axis=1) * keys[0] - chosen[:, -1] * (keys[0] - keys[-1])
    return int(rows @ of_rows)


def pairs_visited(kinds: Array, lengths: tuple[int, int], tile: tuple[int, int], whole: bool = False) -> int:
    """The number of pairs in tiles that are not EMPTY; `lengths` and `tile`: rows and keys. `whole`: keys past the end too."""
    keys = np.full(kinds.shape[1], tile[1]) if whole else extents(lengths[1], tile[1])
    return pairs_in(kinds != EMPTY, extents(lengths[0], tile[0]), keys)


def count_kinds(kinds: Array) -> dict[str, int]:
    return {name: int((kinds == kind).sum()) for kind, name in KIND_NAMES.items()}


def exact_integers(array: Array) -> Array:
    """Integers as int64: they are exact in kernels, and numpy would add a param in the element's own type."""
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


class _Reader:
    """Reads captured tensors, and the tile ranges that the pre-pass would have written."""

    def __init__(self, inputs: dict[str, Array], spans: tuple[Span, ...], blocks: dict[str, int]) -> None:
        self.arrays = {name: exact_integers(array) for name, array in inputs.items()}
        for span in spans:
            moved = np.moveaxis(self.arrays[span.input], span.dim, -1)
            starts = np.arange(0, moved.shape[-1], blocks[span.index])
            for end, least_or_greatest, unknown in zip(span.ends, (np.minimum, np.maximum), (-np.inf, np.inf), strict=True):
                ends = least_or_greatest.reduceat(moved, starts, axis=-1)
                self.arrays[end] = np.where(ends == ends, ends, unknown) if moved.dtype.kind == "f" else ends

    def __call__(self, name: str, indices: tuple[int | Array, ...]) -> Array:
        array = self.arrays[name]
        found: Array = array[tuple(0 if size == 1 else i for i, size in zip(indices, array.shape, strict=True))]
        return found
