"""The oracle on numpy: float64 results, and the same computation at a lower precision for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngen.reference.definition import Problem, Rounding, attention
from attngen.reference.problems import Array, Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage


@dataclass(frozen=True, slots=True)
class Reference:
    """O [batch, q_heads, q_len, head_dim_v] and lse [batch, q_heads, q_len] (None if rows are not a softmax)."""

    output: Array
    lse: Array | None


class NumpyNamespace:
    """numpy, whose widest float is `precision`: the float of an index has no more digits than those of a kernel."""

    __name__ = "numpy"

    def __init__(self, precision: type[np.floating]) -> None:
        self.float64 = precision

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def numpy_attention(
    spec: AttentionSpec,
    sample: Sample,
    params: Mapping[str, int | float] | None = None,
    compute: type[np.floating] = np.float64,
    rounding: Rounding | None = None,
) -> Reference:
    """`spec` applied to the storage arrays of a sample, computed in `compute`.

    `params` are numbers (the spec's defaults for those left out). With `rounding`, matrix products have errors
    as fp32 may have them (`attngen.reference.definition.matrix_product`).
    """
    problem = replace(numbers_of(spec, sample, params or {}, compute), rounding=rounding)
    rows = sample.q.shape[:3]
    output, lse = np.zeros((*rows, sample.v.shape[3]), compute), np.full(rows, -np.inf, compute)
    with np.errstate(all="ignore"):
        return Reference(*attention(problem, output, lse))


def numbers_of(spec: AttentionSpec, sample: Sample, params: Mapping[str, int | float], compute: type[np.floating]) -> Problem:
    """The values of storage arrays, in the precision `compute`."""
    real = {name: _decode(array, compute) for name, array in sample.inputs.items()}
    numbers = {p.name: p.default for p in spec.params if p.default is not None} | dict(params)
    q, k, own_v = (_decode(array, compute) for array in (sample.q, sample.k, sample.v))
    v = own_v if spec.values is None else spec.values_of(k, None)
    return Problem(spec, q, k, v, real, numbers, np if compute is np.float64 else NumpyNamespace(compute))


def _decode(array: Array, compute: type[np.floating]) -> Array:
    values = from_storage(array)
    if values.dtype.kind == "f":
        return values.astype(compute)
    return values.astype(np.int64) if values.dtype.kind in "iu" else values
