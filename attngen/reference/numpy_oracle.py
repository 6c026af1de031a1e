"""The oracle on numpy: float64 truth, and the same computation at a lower precision for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngen.reference.definition import Problem, attention_rows, block_rows
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Reference:
    """O [batch, q_heads, q_len, head_dim_v] and lse [batch, q_heads, q_len] (None where rows are not a softmax)."""

    output: Array
    lse: Array | None


def numpy_attention(
    spec: AttentionSpec,
    q: Array,
    k: Array,
    v: Array,
    *,
    inputs: Mapping[str, Array] | None = None,
    params: Mapping[str, int | float] | None = None,
    compute: type[np.floating[Any]] = np.float64,
) -> Reference:
    """`spec` applied to storage arrays q [batch, q_heads, q_len, head_dim], k and v, computed in `compute`.

    Captured tensors come in `inputs`, numbers in `params` (defaults of the spec where left out).
    """
    problem = numbers_of(spec, Sample(q, k, v, dict(inputs or {})), params or {}, compute)
    batch, q_heads, q_len, _ = q.shape
    output = np.zeros((batch, q_heads, q_len, v.shape[3]), compute)
    lse = np.full((batch, q_heads, q_len), -np.inf, compute)
    step = block_rows(problem)
    with np.errstate(all="ignore"):
        for b in range(batch):
            for h in range(q_heads):
                for start in range(0, q_len, step):
                    rows = slice(start, min(start + step, q_len))
                    output[b, h, rows], row_lse = attention_rows(problem, b, h, rows)
                    if row_lse is not None:
                        lse[b, h, rows] = row_lse
    return Reference(output, lse if spec.normalize == "softmax" else None)


def numbers_of(
    spec: AttentionSpec, sample: Sample, params: Mapping[str, int | float], compute: type[np.floating[Any]]
) -> Problem:
    """Storage arrays as the numbers they stand for, in the precision `compute`."""
    real = {name: _decode(array, compute) for name, array in sample.inputs.items()}
    numbers = {p.name: p.default for p in spec.params if p.default is not None} | dict(params)
    q, k, v = (_decode(array, compute) for array in (sample.q, sample.k, sample.v))
    return Problem(spec, q, k, v, real, numbers, np)


def _decode(array: Array, compute: type[np.floating[Any]]) -> Array:
    values = from_storage(array)
    if values.dtype.kind == "f":
        return values.astype(compute)
    return values.astype(np.int64) if values.dtype.kind in "iu" else values
