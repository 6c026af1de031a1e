"""What several puzzles compute, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attngen.puzzles.puzzle import Array, Random, normal_numbers

FAR = 130  # exp of it is infinite in fp32, and exp(-FAR) is 0
_FAR_Q = 32


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


def far_scores(q: Array, k: Array, level: int, only: Sequence[int] = ()) -> tuple[Array, Array]:
    """q and k with another first column, so that the scores of the keys `only`, or of all keys, are near `level` and differ as
    before; level 0 changes nothing. At FAR and -FAR a kernel that takes exp(score) without the maximum, or begins the maximum
    at 0, writes NaN. With `only` one whose maximum is that of other keys does."""
    if level:
        q, k = q.copy(), k.copy()
        q[:, 0], k[:, 0] = _FAR_Q, 0
        k[[*only] or slice(None), 0] = round(level * q.shape[1] ** 0.5 / _FAR_Q)
    return q, k


def near(level: int, only: Sequence[int] = ()) -> str:
    """`far_scores` in the words of a case."""
    of = f" of key {' and '.join(map(str, only))}" if only else ""
    return f", scores{of} near {level}" if level else ""


def tolerance_of(level: int, plain: float) -> float:
    """That of a case with `far_scores`: fp32 rounds a score of 130 to 1e-5, and so its weight; `plain` at level 0."""
    return 1e-4 if level else plain


def positions(rows: int, keys: int) -> tuple[Array, Array]:
    """The index of the row and of the key, as [rows, 1] and [1, keys]."""
    return np.arange(rows)[:, None], np.arange(keys)[None, :]


@dataclass(frozen=True, slots=True)
class Backward:
    """A forward of n rows and n keys, and its gradients, in fp32: matrices are [n, d], lse and delta [n]."""

    q: Array
    k: Array
    v: Array
    d_o: Array
    o: Array
    lse: Array
    delta: Array
    dq: Array
    dk: Array
    dv: Array

    @classmethod
    def random(cls, rng: Random, n: int, d: int, causal: bool = False) -> Backward:
        """Random inputs, and what follows from them."""
        q, k, v, d_o = 2 * normal_numbers(rng, n, d), *(normal_numbers(rng, n, d) for _ in range(3))
        row, key = positions(n, n)
        p, lse = weights(q, k, key <= row if causal else None)
        o = p @ v
        delta = (d_o * o).sum(1)
        gain = d_o.astype(np.float64) @ v.T - delta[:, None]
        ds = p * np.where(np.abs(gain) < 1e-12, 0.0, gain) / np.sqrt(d)  # exactly 0 in a row with one key
        found = (q, k, v, d_o, o, lse, delta, ds @ k, ds.T @ q, p.T @ d_o)
        return cls(*(one.astype(np.float32) for one in found))
