"""NaN and infinity in Q, K and dO of a problem where the mask should hide them: behind it they leave no trace.

V has none, nor a column of K that is one of V: a weight of 0 times NaN is NaN in O.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngen.reference.definition import allowed_rows
from attngen.reference.numpy_oracle import numbers_of
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import round_to_storage

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SpecialNumbers:
    """A problem with such numbers in rows and keys that have no pairs, and in a row and a key that may have some."""

    problem: Sample
    dout: Array
    rows: Array  # [batch, q_heads, q_len]: which rows they reach
    keys: Array  # [batch, kv_heads, kv_len]: whose gradients they reach

    def left_out(self, found: Mapping[str, Array], exact: Mapping[str, Array], spec: AttentionSpec) -> dict[str, Array]:
        """Results by name, with the exact ones in place of those that the numbers reach."""
        reached = {"k": self.keys, "v": self.keys}
        return {
            name: np.where(
                reached.get(name, self.rows)[..., None],
                round_to_storage(exact[name].astype(np.float32), spec.dtypes.get(name.lower(), spec.dtype)),
                found[name],
            )
            for name in found
        }


def special_numbers(spec: AttentionSpec, problem: Sample, dout: Array, params: Mapping[str, Any], seed: int) -> SpecialNumbers:
    r = random.Random(f"special numbers {seed}")
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = problem.q.shape, problem.k.shape
    of_mask = numbers_of(spec, problem, params, np.float64)
    allowed = np.zeros((batch, heads, q_len, kv_len), bool)
    for b, h in np.ndindex(batch, heads):
        allowed[b, h] = allowed_rows(of_mask, b, h, slice(0, q_len))
    group = heads // kv_heads

    def of_keys(pairs: Array) -> Array:
        """Whether a key has one of these pairs, in any head of its group."""
        return pairs.reshape(batch, kv_heads, group, q_len, kv_len).any(axis=(2, 3))

    rows, keys = np.zeros((batch, heads, q_len), bool), np.zeros((batch, kv_heads, kv_len), bool)
    for one in (rows, keys):
        if one.size and r.random() < 0.5:
            one.flat[r.randrange(one.size)] = True
    hidden_rows, hidden_keys = ~allowed.any(axis=3), ~of_keys(allowed)
    in_q, in_dout = (hidden_rows | rows, hidden_rows) if r.random() < 0.5 else (hidden_rows, hidden_rows | rows)

    def changed(array: Array, places: Array, tensor: str) -> Array:
        copy = array.copy()
        free = [c for c in range(array.shape[-1]) if tensor != "k" or c not in range(*(spec.values or (0, 0)))]
        for place in np.argwhere(places) if free else ():
            columns = r.choice((free, r.choice(free)))
            copy[(*place, columns)] = round_to_storage(np.float32(r.choice((np.nan, np.inf, -np.inf))), spec.dtypes[tensor])
        return copy

    # A key reaches the rows that see it; and by its lse and delta a row reaches all keys that it sees
    reached = rows | (allowed & np.repeat(keys, group, axis=1)[:, :, None, :]).any(axis=3)
    return SpecialNumbers(
        replace(problem, q=changed(problem.q, in_q, "q"), k=changed(problem.k, hidden_keys | keys, "k")),
        changed(dout, in_dout, "o"),
        reached,
        keys | of_keys(allowed & reached[..., None]),
    )
