"""What several puzzles compute, in float64."""

from __future__ import annotations

import numpy as np

from attngen.puzzles.puzzle import Array


def attention(q: Array, k: Array, v: Array, keep: Array | None = None) -> Array:
    """softmax(q k^T / sqrt(d)) v for one head: q [rows, d], k and v [keys, d], keep [rows, keys]."""
    p, _ = weights(q, k, keep)
    return np.asarray(p @ v.astype(np.float64))


def weights(q: Array, k: Array, keep: Array | None = None) -> tuple[Array, Array]:
    """The weights of the keys, [rows, keys], and the log of the sum of exp(score), [rows]."""
    s = q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(q.shape[1])
    if keep is not None:
        s = np.where(keep, s, -np.inf)
    lse = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
    return np.exp(s - lse[:, None]), lse


def positions(rows: int, keys: int) -> tuple[Array, Array]:
    """The index of the row and of the key, as [rows, 1] and [1, keys]."""
    return np.arange(rows)[:, None], np.arange(keys)[None, :]
