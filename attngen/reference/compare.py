"""How wrong a result is, and how wrong it may be.

Errors are the maximum over all elements, against float64. The bound is twice the error of the same computation done the way
torch's math backend does it at the same storage precision (fp32 arithmetic, output rounded to storage), plus one unit in the
last place of the largest output; with `precision high`, what that allows besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attngen.reference.numpy_oracle import Reference, numpy_attention
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP32, DType, from_storage, round_to_storage

Array = np.ndarray[Any, Any]

FRACTION_BITS = {"fp16": 10, "bf16": 7, "fp32": 23}


@dataclass(frozen=True, slots=True)
class Truth:
    """The float64 result of a problem and the errors allowed to a kernel."""

    reference: Reference
    allowed: float
    allowed_lse: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest errors of one result, beside what is allowed. NaN counts as an infinite error."""

    error: float
    allowed: float
    lse_error: float | None
    allowed_lse: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed and (self.lse_error is None or self.lse_error <= self.allowed_lse)


def unit_in_last_place(magnitude: float, dtype: DType) -> float:
    """The distance between neighbouring numbers of `dtype` at `magnitude`."""
    if magnitude == 0 or not np.isfinite(magnitude):
        return 0.0
    return float(2.0 ** (np.floor(np.log2(magnitude)) - FRACTION_BITS[dtype.name]))


def truth(spec: AttentionSpec, problem: Sample, params: Mapping[str, int | float] | None = None) -> Truth:
    """The float64 result of `problem` and the bounds that follow from computing it in storage precision."""
    exact = numpy_attention(spec, problem.q, problem.k, problem.v, inputs=problem.inputs, params=params)
    single = numpy_attention(spec, problem.q, problem.k, problem.v, inputs=problem.inputs, params=params, compute=np.float32)
    stored = from_storage(round_to_storage(single.output, spec.dtype))
    allowed = bound(max_error(stored, exact.output), exact.output, spec.dtype) + precision_allows(spec, exact.output)
    allowed_lse = 0.0
    if exact.lse is not None and single.lse is not None:
        allowed_lse = lse_bound(max_error(single.lse.astype(np.float64), exact.lse), exact.lse, problem.k.shape[2])
        allowed_lse += precision_allows(spec, exact.lse)
    return Truth(exact, allowed, allowed_lse)


def bound(error: float, exact: Array, dtype: DType) -> float:
    """Twice `error` plus one unit in the last place of the largest finite element."""
    finite = np.abs(exact[np.isfinite(exact)])
    largest = float(finite.max()) if finite.size else 0.0
    return 2.0 * error + unit_in_last_place(largest, dtype)


def precision_allows(spec: AttentionSpec, exact: Array) -> float:
    """What `precision high` may cost: 1e-4, or that of the largest element where it exceeds 1, and 1e-3 of the largest; with
    elements of 16 bits, 1e-2 of the largest."""
    if spec.precision == "highest":
        return 0.0
    largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
    if spec.dtype.bytes == 2:
        return 1e-2 * largest
    return min(1e-4 * max(1.0, largest), 1e-3 * largest)


def lse_bound(error: float, exact: Array, kv_len: int) -> float:
    """`bound` in fp32, plus what summing kv_len terms one after the other may lose: 2 sqrt(n) u (Higham and Mary 2019)."""
    return bound(error, exact, FP32) + 2.0 * float(np.sqrt(kv_len)) * 2.0**-24


def max_error(found: Array, exact: Array) -> float:
    """The largest difference; infinite where one is NaN or infinite and the other is not the same."""
    if found.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.where(found == exact, 0.0, np.abs(found - exact))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def compare(found: Array, lse: Array | None, expected: Truth) -> Comparison:
    """`found` and `lse` (storage arrays) against the truth."""
    exact = expected.reference
    error = max_error(from_storage(found), exact.output)
    lse_error = None if lse is None or exact.lse is None else max_error(from_storage(lse), exact.lse)
    return Comparison(error, expected.allowed, lse_error, expected.allowed_lse)


__all__ = [
    "Comparison",
    "Truth",
    "bound",
    "compare",
    "lse_bound",
    "max_error",
    "precision_allows",
    "truth",
    "unit_in_last_place",
]
