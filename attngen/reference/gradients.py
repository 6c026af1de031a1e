"""The gradients that `gradient_of` derives, on numpy arrays: in float64, or at a lower precision for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from attngen.reference.definition import (
    Problem,
    Rounding,
    angles,
    blocks_of_rows,
    dropout_rows,
    key_rows,
    kv_head,
    matrix_product,
    query_rows,
    surroundings,
    turned,
    weight_rows,
)
from attngen.reference.numpy_oracle import numbers_of
from attngen.reference.problems import Array, Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage, round_to_storage
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Expr
from attngen.spec.gradient import Contribution, Gradient, gradient_of


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by its gradients: `dout` by O, a storage array of its shape, and `dlse` by lse (None: 0)."""

    dout: Array
    dlse: Array | None = None


def sample_loss(spec: AttentionSpec, sample: Sample, seed: int = 0) -> Loss:
    """A random loss: randn gradients of O and, if lse is an output, of lse."""
    rng = np.random.default_rng((seed, 1))
    rows = sample.q.shape[:3]
    dout = round_to_storage(rng.standard_normal((*rows, spec.head_dim_v), dtype=np.float32), spec.dtype)
    return Loss(dout, rng.standard_normal(rows, dtype=np.float32) if spec.lse else None)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward has saved, as one in fp32 finds it: O, rounded to storage, and lse; None: not saved."""

    output: Array | None
    lse: Array | None


@dataclass(frozen=True, slots=True)
class Sum:
    """The gradient of one argument, and what the error of adding it up follows from."""

    value: Array
    magnitude: Array  # for each element, the sum of its terms' magnitudes
    terms: Array  # and their number


def numpy_gradients(
    spec: AttentionSpec,
    sample: Sample,
    loss: Loss,
    wanted: tuple[str, ...],
    params: Mapping[str, int | float] | None = None,
    compute: type[np.floating] = np.float64,
    saved: Saved | None = None,
    rounding: Rounding | None = None,
) -> dict[str, Sum]:
    """The gradients `wanted` of a loss, by name, computed in `compute`: see attngen.spec.gradient for the equations.

    If lse is `saved`, weights follow from it, else they are those of a forward. If O is, delta is the row sum of dO * O, else
    that of P * dP. With `rounding`, matrix products
    have errors as fp32 may have them (`attngen.reference.definition.matrix_product`).
    """
    problem = replace(numbers_of(spec, sample, params or {}, compute), rounding=rounding)
    dlse = np.zeros(problem.q.shape[:3], compute) if loss.dlse is None else from_storage(loss.dlse).astype(compute)
    dout = from_storage(loss.dout).astype(compute)
    gradients = _Gradients(problem, gradient_of(spec), dout, dlse, wanted, saved)
    with np.errstate(all="ignore"):
        for b, h, rows in product(range(problem.q.shape[0]), range(problem.q.shape[1]), blocks_of_rows(problem)):
            gradients.add(b, h, rows)
    return {name: gradients.sums[name] for name in wanted}


class _Gradients:
    """Gradients that grow block by block."""

    def __init__(
        self, problem: Problem, gradient: Gradient, dout: Array, dlse: Array, wanted: tuple[str, ...], saved: Saved | None
    ) -> None:
        self.problem, self.gradient, self.dout, self.dlse, self.saved = problem, gradient, dout, dlse, saved
        arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
        shapes = {name: arrays[name].shape if name in arrays else () for name in wanted}
        kind = problem.q.dtype
        self.sums = {n: Sum(np.zeros(s, kind), np.zeros(s), np.zeros(s)) for n, s in shapes.items()}

    def add(self, b: int, h: int, rows: slice) -> None:
        """Adds the terms of a block of rows of one head."""
        problem, spec = self.problem, self.problem.spec
        kv = kv_head(problem, h)
        q, k, v, dout = query_rows(problem, b, h, rows), key_rows(problem, b, h), problem.v[b, kv], self.dout[b, h, rows]
        at = (b, h, rows.start)
        dot = matrix_product(problem, q, k.T, "s", at)
        names, *rest = surroundings(problem, b, h, rows)
        scale = np.asarray(evaluate(spec.scale, names, *rest)).astype(q.dtype)
        names["s"] = dot * scale

        def values(expr: Expr) -> Array:
            return np.broadcast_to(np.asarray(evaluate(expr, names, *rest)), dot.shape).astype(q.dtype)

        found = weight_rows(problem, b, h, rows)
        if found.allowed is not None:  # a softmax of scores with NaN has NaN at all pairs
            found = replace(found, weights=np.where(found.allowed, found.weights, 0).astype(q.dtype))
        if self.saved is not None and self.saved.lse is not None and found.lse is not None:
            change = np.exp(np.where(np.isfinite(found.lse), found.lse - self.saved.lse[b, h, rows], 0.0))
            found = replace(found, weights=(found.weights * change[:, None]).astype(q.dtype))
        dp = matrix_product(problem, dout, v.T, "dp", at)
        dp = dp if found.allowed is None else np.where(found.allowed, dp, 0)
        factors = dropout_rows(problem, b, h, rows)
        dropped = found.weights
        if factors is not None:
            dp, dropped = _times(factors, dp), _times(factors, found.weights)
        if self.saved is not None and self.saved.output is not None:
            delta = (dout * self.saved.output[b, h, rows].astype(q.dtype)).sum(-1, dtype=q.dtype)
        else:
            delta = _product_sum(found.weights, dp)
        delta = delta[:, None] - self.dlse[b, h, rows][:, None]
        ds_of_score = _score_gradients(spec, found.weights, dp, delta)
        ds = _times(ds_of_score, values(self.gradient.ds))
        dq, dk = scale * self._product(ds, k, "dq", at), scale * self._product(ds.T, q, "dk", at)
        if spec.rotary is not None:
            dq = self._turned_back(dq, *angles(problem, b, rows))
            dk = self._turned_back(dk, *angles(problem, b))
        self._add_rows("q", (b, h, rows), dq)
        self._add_rows("k", (b, kv), dk)
        self._add_rows("v", (b, kv), self._product(dropped.T, dout, "dv", at))
        for captured in self.gradient.captured:
            for c in captured.contributions if captured.name in self.sums else ():
                if c.source == "score":
                    terms = _times(ds_of_score, values(c.factor))
                elif c.source == "scale":
                    terms = _times(ds, dot) * np.asarray(evaluate(c.factor, names, *rest)).astype(q.dtype)
                else:
                    assert found.sink_weight is not None
                    factor = np.asarray(evaluate(c.factor, names, *rest)).astype(q.dtype)
                    terms = np.broadcast_to(_times(-found.sink_weight, delta * factor), delta.shape)
                self._scatter(captured.name, c, terms, names, rest)

    def _turned_back(self, rows: Array, cosines: Array, sines: Array) -> Array:
        return np.asarray(turned(self.problem, rows, cosines, -sines))

    def _product(self, a: Array, b: Array, result: str, at: tuple[int, ...]) -> Array:
        """a @ b, of which terms with a factor of 0 in `a` are 0."""
        if np.isfinite(b).all():
            return np.asarray(matrix_product(self.problem, a, b, result, at))
        return np.asarray(np.where(a[:, :, None] == 0, 0, a[:, :, None] * b[None]).sum(1, dtype=a.dtype))

    def _add_rows(self, name: str, at: tuple[int | slice, ...], rows: Array) -> None:
        if name in self.sums:
            self.sums[name].value[at] += rows

    def _scatter(self, name: str, contribution: Contribution, terms: Array, names: Mapping[str, Any], rest: list[Any]) -> None:
        """Adds each term to the element that its pair reads."""
        total = self.sums[name]
        spec = self.problem.spec
        if not contribution.indices:
            total.value[()] += terms.sum(dtype=terms.dtype)
            total.magnitude[()] += np.abs(terms).sum(dtype=np.float64)
            total.terms[()] += terms.size
            return
        dims = spec.input(name).dims
        at = tuple(
            np.broadcast_to(np.asarray(evaluate(index, names, *rest)), terms.shape) * (size != 1 or not isinstance(dim, str))
            for index, size, dim in zip(contribution.indices, total.value.shape, dims, strict=True)
        )
        np.add.at(total.value, at, terms)
        np.add.at(total.magnitude, at, np.abs(terms))
        np.add.at(total.terms, at, 1)


def _score_gradients(spec: AttentionSpec, weights: Array, dp: Array, delta: Array) -> Array:
    """dS, by the normalization."""
    match spec.normalize:
        case "softmax":
            return _times(weights, dp - delta)
        case "sigmoid":
            return _times(weights, dp * (1 - weights))
    return dp


def _times(a: Array, b: Array) -> Array:
    """a * b, but 0 where a is 0, whatever b is: pairs without weight have no gradient."""
    return np.where(a == 0, 0, a * b).astype(a.dtype)


def _product_sum(a: Array, b: Array) -> Array:
    return np.asarray(_times(a, b).sum(-1, dtype=a.dtype))
