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
class Wrong:
    """The elements of one tensor that are off by more than the bound: the first of them, how many there are, and where.

    `index` is (b, h, q, d) in O and (b, h, q) in lse. `where` names the heads, rows, ... that hold all of them; "" if they are
    everywhere.
    """

    tensor: str
    index: tuple[int, ...]
    found: float
    expected: float
    count: int
    elements: int
    where: str

    def __str__(self) -> str:
        at = ", ".join(f"{axis}={i}" for axis, i in zip(AXES, self.index, strict=False))
        share = f"{self.count:,} of {self.elements:,} elements of {self.tensor} are wrong"
        where = f", all in {self.where}" if self.where else ""
        return f"first at {self.tensor}[{at}]: {self.found:.6g}, expected {self.expected:.6g}; {share}{where}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest errors of one result, and the bounds of both. NaN counts as an infinite error. `wrong` says which elements
    exceed the bound, one entry per tensor."""

    error: float
    allowed: float
    lse_error: float | None
    allowed_lse: float
    wrong: tuple[Wrong, ...] = ()

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed and (self.lse_error is None or self.lse_error <= self.allowed_lse)

    @property
    def excess(self) -> float:
        """The error as a multiple of its bound, of O or lse, whichever is larger."""
        pairs = [(self.error, self.allowed), (self.lse_error or 0.0, self.allowed_lse)]
        return max(error / allowed if allowed else np.inf if error else 0.0 for error, allowed in pairs)


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


def errors(found: Array, exact: Array) -> Array:
    """The difference of each element; infinite where one is NaN or infinite and the other is not the same."""
    with np.errstate(invalid="ignore"):
        difference = np.where(found == exact, 0.0, np.abs(found - exact))
    return np.where(np.isnan(difference), np.inf, difference)


def max_error(found: Array, exact: Array) -> float:
    """The largest of `errors`."""
    return float(errors(found, exact).max()) if found.size else 0.0


def compare(found: Array, lse: Array | None, expected: Truth) -> Comparison:
    """`found` and `lse` (storage arrays) against the truth."""
    exact = expected.reference
    output = from_storage(found)
    wrong = [_wrong("O", output, exact.output, expected.allowed)]
    error, lse_error = max_error(output, exact.output), None
    if lse is not None and exact.lse is not None:
        sums = from_storage(lse)
        lse_error = max_error(sums, exact.lse)
        wrong.append(_wrong("lse", sums, exact.lse, expected.allowed_lse))
    return Comparison(error, expected.allowed, lse_error, expected.allowed_lse, tuple(w for w in wrong if w is not None))


def _wrong(tensor: str, found: Array, exact: Array, allowed: float) -> Wrong | None:
    is_wrong = ~(errors(found, exact) <= allowed)
    count = int(np.count_nonzero(is_wrong))
    if not count:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape))
    return Wrong(tensor, index, float(found[index]), float(exact[index]), count, is_wrong.size, _where(is_wrong))


AXES = "bhqd"
AXIS_NAMES = {"b": ("batch", "batches"), "h": ("head", "heads"), "q": ("row", "rows"), "d": ("column", "columns")}
LISTED = 3  # indices that are named one by one


def _where(is_wrong: Array) -> str:
    """The batches, heads, rows and columns that hold every wrong element, as far as these are not all of them."""
    parts = []
    for axis, letter in zip(range(is_wrong.ndim), AXES, strict=False):
        others = tuple(a for a in range(is_wrong.ndim) if a != axis)
        at = np.flatnonzero(is_wrong.any(axis=others))
        size = is_wrong.shape[axis]
        if len(at) == size:
            continue
        first, last = int(at[0]), int(at[-1])
        one, several = AXIS_NAMES[letter]
        if len(at) <= LISTED:
            parts.append(f"{one if len(at) == 1 else several} {', '.join(map(str, at))}")
        elif len(at) == last - first + 1:
            parts.append(f"{several} {first} to {last}" if last < size - 1 else f"{several} >= {first}")
        elif first > 0 or last < size - 1:
            parts.append(f"{len(at)} of the {several} {first} to {last}")
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


__all__ = [
    "Comparison",
    "Truth",
    "Wrong",
    "bound",
    "compare",
    "errors",
    "lse_bound",
    "max_error",
    "precision_allows",
    "truth",
    "unit_in_last_place",
]
