"""The classification of tiles by evaluating the mask for every pair: the reference for mask bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attngen.plan.block_map import EMPTY, FULL, PARTIAL, classify_tiles
from attngen.plan.mask_bounds import MaskBounds
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr

Array = np.ndarray[Any, Any]
Names = Mapping[str, int | float]
SOLVED = ("k", "q")  # keys of a block of rows, and rows of a block of keys


def allowed_pairs(mask: Expr, names: Names, inputs: Mapping[str, Array]) -> Array:
    """The mask of every pair: [q_len, kv_len]."""
    wide = {n: a.astype(np.int64) if a.dtype.kind == "i" else a for n, a in inputs.items()}
    shape = int(names["q_len"]), int(names["kv_len"])
    pairs = {**names, "q": np.arange(shape[0])[:, None], "k": np.arange(shape[1])[None, :]}
    return np.broadcast_to(np.asarray(evaluate(mask, pairs, lambda name, at: wide[name][at], np), bool), shape)


def kinds_of(allowed: Array, block_q: int, block_kv: int, solve: str = "k", missing: int = 0) -> Array:
    """EMPTY, PARTIAL or FULL for every tile, in the format of `classify_tiles`."""
    if solve == "q":
        allowed, block_q, block_kv = allowed.T, block_kv, block_q
    blocks, tiles = -(-allowed.shape[0] // block_q), -(-allowed.shape[1] // block_kv)
    kinds = np.empty((blocks, tiles), int)
    for i, j in np.ndindex(blocks, tiles):
        first = i * block_q - missing
        tile = allowed[max(first, 0) : max(first + block_q, 0), j * block_kv : (j + 1) * block_kv]
        whole = (j + 1) * block_kv <= allowed.shape[1]
        kinds[i, j] = FULL if tile.all() and whole else PARTIAL if tile.any() else EMPTY
    return kinds


def assert_never_wrong(
    bounds: MaskBounds,
    allowed: Array,
    tile: tuple[int, int],
    names: Names,
    inputs: Mapping[str, Array] | None = None,
    missing: int = 0,
) -> tuple[Array, Array]:
    """The tiles as `bounds` classify them, and as they are: partial ones may be any, no other may differ."""
    found = classify_tiles(bounds, *tile, names, inputs, missing)
    exact = kinds_of(allowed, *tile, bounds.axis.index, missing)
    assert found.shape == exact.shape
    assert not ((found != exact) & (found != PARTIAL)).any(), (bounds, found, exact)
    return found, exact
