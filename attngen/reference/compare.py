"""Errors of a result against float64, and their limits.

Errors are the maximum over all elements, against float64. The bound is twice the error of the same computation done the way
torch's math backend does it at the same storage precision (fp32 arithmetic, output rounded to storage), plus one unit in the
last place of the largest output. `precision high` allows more: in fp32, the errors that products of split numbers have
(`attngen.reference.definition.matrix_product`), so that the bound grows with the terms of sums and not with their results.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attngen.reference.definition import Rounding
from attngen.reference.numpy_oracle import Reference, numpy_attention
from attngen.reference.problems import Array, Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP32, DType, from_storage, round_to_storage

MOST_LSE = 1e37  # lse beyond it is that of a sink, and may be wrong (docs/language.md)
MOST_DRAWS = 16  # draws of random errors
PAIRS = 2**20  # pairs of a row and a key in all draws together, at least: of many rows a few may decide the largest error


@dataclass(frozen=True, slots=True)
class Truth:
    """The float64 result of a problem, and the largest errors allowed to a kernel."""

    reference: Reference
    allowed: float
    allowed_lse: float

    def of_batch(self, b: int) -> Truth:
        """What is expected of one batch."""
        output, lse = self.reference.output, self.reference.lse
        return replace(self, reference=Reference(output[b : b + 1], None if lse is None else lse[b : b + 1]))


@dataclass(frozen=True, slots=True)
class Wrong:
    """The elements of one tensor whose error exceeds the bound: the first one, their number and their place."""

    tensor: str
    index: tuple[int, ...]  # an entry for each of `axes`
    found: float
    expected: float
    count: int
    elements: int
    where: str  # the heads, rows, ... that contain all of them; "" if these are not restricted
    axes: tuple[str, ...]  # (b, h, q, d) of O, (b, h, q) of lse

    def __str__(self) -> str:
        at = ", ".join(f"{axis}={i}" for axis, i in zip(self.axes, self.index, strict=True))
        share = f"{self.count:,} of {self.elements:,} elements of {self.tensor} are wrong"
        where = f", all in {self.where}" if self.where else ""
        return f"first at {self.tensor}[{at}]: {self.found:.6g}, expected {self.expected:.6g}; {share}{where}"


LEAST = 2.0**-149  # smallest positive number of fp32


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest errors of O and lse, or of a gradient, and their bounds. NaN instead of a number is an infinite error."""

    error: float
    allowed: float
    lse_error: float | None = None
    allowed_lse: float = 0.0
    wrong: tuple[Wrong, ...] = ()  # an entry for each tensor with elements that exceed the bound

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed and (self.lse_error is None or self.lse_error <= self.allowed_lse)

    @property
    def excess(self) -> float:
        """The error as a multiple of its bound: the larger of O's and lse's. An error that is less than any number of fp32, of
        results that round to 0, counts as none if it is within its bound."""
        pairs = [(self.error, self.allowed), (self.lse_error or 0.0, self.allowed_lse)]
        pairs = [(error, allowed) for error, allowed in pairs if error > allowed or error >= LEAST]
        return max((error / allowed if allowed else np.inf for error, allowed in pairs), default=0.0)


def unit_in_last_place(magnitude: float, dtype: DType) -> float:
    """The distance between neighbouring numbers of `dtype` at `magnitude`."""
    if magnitude == 0 or not np.isfinite(magnitude):
        return 0.0
    return float(2.0 ** (np.floor(np.log2(magnitude)) - dtype.fraction_bits))


def truth(
    spec: AttentionSpec,
    problem: Sample,
    params: Mapping[str, int | float] | None = None,
    most_draws: int = MOST_DRAWS,
    exact: Reference | None = None,
    of_bytes: bool = False,
) -> Truth:
    """The float64 result of `problem` and the bounds that follow from computing it in storage precision; `exact` is that
    result, if it is known. `of_bytes`: a kernel's products are of 8 bits (`Schedule.multiplies_bytes`), so its errors may be
    those of weights in e4m3, and of sums that wgmma keeps of them.

    The error of fp32 is the larger of what it is here and what it may be on any machine: numpy's products add in an order of
    the machine's, and one row has few of them. Problems of few pairs have several draws of such errors, as one may be small by
    chance. With fewer draws, at most `most_draws`, the bounds are the same or lower.
    """
    exact = exact or numpy_attention(spec, problem, params)
    draws = draws_of(problem, most_draws)
    inexact = [numpy_attention(spec, problem, params, np.float32)]
    shared: dict[Hashable, object] | None = {} if draws > 1 else None
    inexact += [
        numpy_attention(spec, problem, params, rounding=Rounding(i, of_bytes=of_bytes, shared=shared)) for i in range(draws)
    ]
    return Truth(exact, *allowed_errors(spec, exact, inexact, problem.k.shape[2]))


def allowed_errors(spec: AttentionSpec, exact: Reference, inexact: Sequence[Reference], kv_len: int) -> tuple[float, float]:
    """The largest errors allowed to O and to lse (0 without one): bounds of the largest ones that `inexact` has."""
    error = max(max_error(_stored(spec, one.output), exact.output) for one in inexact)
    allowed = bound(error, exact.output, spec.dtypes["o"]) + precision_allows(spec, exact.output)
    if exact.lse is None:
        return allowed, 0.0
    error = max(max_error(promised(np.asarray(one.lse, np.float64), exact.lse), exact.lse) for one in inexact)
    largest = np.where(is_promised(exact.lse), exact.lse, 0.0)
    return allowed, lse_bound(error, largest, kv_len) + precision_allows(spec, largest)


def is_promised(lse: Array) -> Array:
    """Where lse must be right: not beyond MOST_LSE."""
    found: Array = ~np.isfinite(lse) | (np.abs(lse) <= MOST_LSE)
    return found


def promised(found: Array, exact: Array) -> Array:
    """The lse that is `found`, with the exact one where it need not be right."""
    return np.where(is_promised(exact), found, exact)


def draws_of(problem: Sample, most: int) -> int:
    """The number of draws of random errors, at most `most`, that have PAIRS pairs together; at least 1."""
    batch, q_heads, q_len, _ = problem.q.shape
    pairs: int = batch * q_heads * q_len * problem.k.shape[2]
    return min(max(PAIRS // max(pairs, 1), 1), most)


def _stored(spec: AttentionSpec, output: Array) -> Array:
    return from_storage(round_to_storage(output.astype(np.float32), spec.dtypes["o"]))


def bound(error: float, exact: Array, dtype: DType) -> float:
    """Twice `error` plus one unit in the last place of the largest finite element."""
    finite = np.abs(exact[np.isfinite(exact)])
    largest = float(finite.max()) if finite.size else 0.0
    return 2.0 * error + unit_in_last_place(largest, dtype)


def precision_allows(spec: AttentionSpec, exact: Array) -> float:
    """The additional error that `precision high` allows to functions of scores in 16 bits: 1e-2 of the largest element."""
    if spec.precision == "highest" or spec.dtype.bytes != 2:
        return 0.0
    return 1e-2 * float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))


def lse_bound(error: float, exact: Array, kv_len: int) -> float:
    """`bound` in fp32, plus the error of adding n = kv_len terms one by one: 2 sqrt(n) u (Higham and Mary 2019)."""
    return bound(error, exact, FP32) + 2.0 * float(np.sqrt(kv_len)) * 2.0**-24


def errors(found: Array, exact: Array) -> Array:
    """The difference of each element; infinite if one is NaN or infinite and the other is not the same."""
    with np.errstate(invalid="ignore"):
        same = (found == exact) | (np.isnan(found) & np.isnan(exact))
        difference = np.where(same, 0.0, np.abs(found - exact))
    return np.where(np.isnan(difference), np.inf, difference)


def max_error(found: Array, exact: Array) -> float:
    """The largest of `errors`."""
    return float(errors(found, exact).max()) if found.size else 0.0


def compare(found: Array, lse: Array | None, expected: Truth) -> Comparison:
    """The errors of `found` (O) and `lse`, both storage arrays."""
    exact = expected.reference
    output = from_storage(found)
    wrong = [wrong_elements("O", output, exact.output, expected.allowed)]
    error, lse_error = max_error(output, exact.output), None
    if lse is not None and exact.lse is not None:
        sums = promised(from_storage(lse), exact.lse)
        lse_error = max_error(sums, exact.lse)
        wrong.append(wrong_elements("lse", sums, exact.lse, expected.allowed_lse))
    return Comparison(error, expected.allowed, lse_error, expected.allowed_lse, tuple(w for w in wrong if w is not None))


AXES = ("b", "h", "q", "d")


def wrong_elements(tensor: str, found: Array, exact: Array, allowed: float, axes: tuple[str, ...] = AXES) -> Wrong | None:
    """The elements of `found` whose error exceeds `allowed`; None if there is none."""
    is_wrong = ~(errors(found, exact) <= allowed)
    count = int(np.count_nonzero(is_wrong))
    if not count:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape))
    return Wrong(
        tensor,
        index,
        float(found[index]),
        float(exact[index]),
        count,
        is_wrong.size,
        _where(is_wrong, axes),
        axes[: is_wrong.ndim],
    )


AXIS_NAMES = {
    "b": ("batch", "batches"), "h": ("head", "heads"), "q": ("row", "rows"), "k": ("key", "keys"), "d": ("column", "columns")
}  # fmt: skip
LISTED = 3  # indices: at most so many are named one by one


def _where(is_wrong: Array, axes: tuple[str, ...]) -> str:
    """The batches, heads, rows and columns that contain all wrong elements; an axis is left out if all of its indices do."""
    parts = []
    for axis, letter in zip(range(is_wrong.ndim), axes, strict=False):
        others = tuple(a for a in range(is_wrong.ndim) if a != axis)
        at = np.flatnonzero(is_wrong.any(axis=others))
        size = is_wrong.shape[axis]
        if len(at) == size:
            continue
        first, last = int(at[0]), int(at[-1])
        one, several = AXIS_NAMES.get(letter, (letter, letter))
        if len(at) <= LISTED:
            parts.append(f"{one if len(at) == 1 else several} {', '.join(map(str, at))}")
        elif len(at) == last - first + 1:
            parts.append(f"{several} {first} to {last}" if last < size - 1 else f"{several} >= {first}")
        elif first > 0 or last < size - 1:
            parts.append(f"{len(at)} of the {several} {first} to {last}")
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"
