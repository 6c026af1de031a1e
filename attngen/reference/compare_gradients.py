"""Errors of gradients against float64, and their limits, as `attngen.reference.compare` has them for O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from attngen.reference.compare import Comparison, bound, draws_of, max_error, precision_allows, wrong_elements
from attngen.reference.definition import TERM, Rounding
from attngen.reference.gradients import Loss, Saved, Sum, numpy_gradients
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Array, Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP32, DType, from_storage, round_to_storage, unit_roundoff
from attngen.spec.gradient import QKV, gradient_argument

DRAWS = 5  # draws of random errors for gradients of captured tensors: one for few elements or rows may be small by chance
DRAWS_OF_QKV = 4  # at most: each element of a product has an error in one of them


@dataclass(frozen=True, slots=True)
class GradientTruth:
    """The float64 gradients of a problem, and the largest error allowed to each, by the names of what they are gradients of."""

    exact: Mapping[str, Array]
    allowed: Mapping[str, float]
    axes: Mapping[str, tuple[str, ...]]  # the names of their axes

    def of_batch(self, b: int) -> GradientTruth:
        """What is expected of one batch: the gradients of Q, K and V alone, as others are sums over all."""
        return replace(self, exact={name: array[b : b + 1] for name, array in self.exact.items() if name in QKV})

    def of_call(self, spec: AttentionSpec, names: tuple[str, ...]) -> GradientTruth:
        """The gradients `names` that a call returns: where V is a part of K, that of K has that of V too."""
        exact, allowed = dict(self.exact), dict(self.allowed)
        if spec.values is not None and "k" in names:
            columns = (..., slice(*spec.values))
            exact["k"] = exact["k"].copy()
            exact["k"][columns] += exact["v"]
            allowed["k"] += allowed["v"]
        return GradientTruth({n: exact[n] for n in names}, {n: allowed[n] for n in names}, {n: self.axes[n] for n in names})


def gradient_truth(
    spec: AttentionSpec,
    problem: Sample,
    loss: Loss,
    wanted: tuple[str, ...] = QKV,
    params: Mapping[str, int | float] | None = None,
    saved: tuple[str, ...] = (),
    most_draws: int = DRAWS,
) -> GradientTruth:
    """The float64 gradients of `problem`, and the bounds that follow from computing them in fp32 and rounding to storage.

    `saved` are the results of the forward that a backward reads. If O is among them, delta follows from it; if lse is, weights
    do: both with errors as they may have them. The error of fp32 is the larger of what it is here and what it may be on any
    machine, as in `attngen.reference.compare.truth`.

    A sum of n terms over pairs may have the error of adding them in another order too: 2 sqrt(n) u times the sum of their
    magnitudes (Higham and Mary 2019). With fewer draws of errors, at most `most_draws`, the bounds are the same or lower.
    """
    exact = numpy_gradients(spec, problem, loss, wanted, params)
    single = numpy_gradients(spec, problem, loss, wanted, params, np.float32)
    inexact = [single]  # and one for each draw of random errors
    of_qkv = draws_of(problem, min(DRAWS_OF_QKV, most_draws))
    for draw in range(min(DRAWS, most_draws) if set(wanted) - set(QKV) else of_qkv):
        forward = _inexact(spec, problem, params, draw, saved) if saved else None
        inexact.append(numpy_gradients(spec, problem, loss, wanted, params, saved=forward, rounding=Rounding(draw)))
    allowed = {
        n: max(_allowed(spec, n, exact[n], one[n]) for one in (inexact[: 1 + of_qkv] if n in QKV else inexact)) for n in wanted
    }
    return GradientTruth({n: total.value for n, total in exact.items()}, allowed, {n: _axes(spec, n) for n in wanted})


def _inexact(
    spec: AttentionSpec, problem: Sample, params: Mapping[str, int | float] | None, draw: int, saved: tuple[str, ...]
) -> Saved:
    """O and lse, if `saved`, with errors as of a forward that rounds weights for tensor cores, and O, to storage."""
    rounding = Rounding(DRAWS + draw, max(TERM, unit_roundoff(spec.dtype)))
    found = numpy_attention(spec, problem, params, rounding=rounding)
    output = from_storage(round_to_storage(found.output.astype(np.float32), spec.dtype)) if "out" in saved else None
    return Saved(output, found.lse if "lse" in saved else None)


def gradient_dtype(spec: AttentionSpec, name: str) -> DType:
    """The element type of a gradient: that of its tensor; fp32 for a param."""
    inputs = {i.name: i.dtype for i in spec.inputs}
    return spec.dtype if name in QKV else inputs.get(name, FP32)


def _allowed(spec: AttentionSpec, name: str, exact: Sum, single: Sum) -> float:
    dtype = gradient_dtype(spec, name)
    stored = from_storage(round_to_storage(single.value, dtype))
    allowed = bound(max_error(stored, exact.value), exact.value, dtype) + precision_allows(spec, exact.value)
    of_sums = 2.0 * np.sqrt(exact.terms) * unit_roundoff(FP32) * exact.magnitude
    return allowed + float(of_sums[np.isfinite(of_sums)].max(initial=0.0))


def _axes(spec: AttentionSpec, name: str) -> tuple[str, ...]:
    if name in QKV:
        return ("b", "h", "q" if name == "q" else "k", "d")
    return next((tuple(map(str, i.dims)) for i in spec.inputs if i.name == name), ())


def compare_gradients(found: Mapping[str, Array], expected: GradientTruth) -> dict[str, Comparison]:
    """The errors of storage arrays, by name."""
    return {name: _compare(name, from_storage(np.asarray(found[name])), expected) for name in expected.exact}


def _compare(name: str, found: Array, expected: GradientTruth) -> Comparison:
    exact, allowed = expected.exact[name], expected.allowed[name]
    wrong = wrong_elements(gradient_argument(name), found, exact, allowed, expected.axes[name])
    return Comparison(max_error(found, exact), allowed, wrong=(wrong,) if wrong else ())
