"""The parts of a spec that a problem exercises: without such a part, some result of the problem would be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from attngen.reference.alternatives import Alternative
from attngen.reference.compare import Truth, allowed_errors, max_error
from attngen.reference.definition import Problem, Rounding, allowed_rows, attention_rows, is_split, score_rows
from attngen.reference.numpy_oracle import Reference, numbers_of
from attngen.reference.problems import Array, Sample
from attngen.spec.attention import AttentionSpec, Input
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Type, gather, name

MAX_PAIRS = 2**19  # pairs of a row and a key, compared in one head
MARGIN = 3.0  # an alternative must differ by so many bounds: the kernel's own error may hide one of them
OUTSIDE = {"f": np.nan, "i": 2**30, "b": False}  # values read outside a captured tensor, by kind of element


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one head (b, h, rows): the results of the spec, and the bounds of a kernel's errors."""

    place: tuple[int, int, slice]
    truth: Truth

    def of_row(self, row: int) -> _Part:
        """The row `row` of the head alone."""
        b, h, rows = self.place
        at = slice(row - rows.start, row - rows.start + 1)
        exact = self.truth.reference
        one = Reference(exact.output[at], None if exact.lse is None else exact.lse[at])
        return _Part((b, h, slice(row, row + 1)), replace(self.truth, reference=one))


class Exercise:
    """A problem with the results of a few of its heads, with which results of alternatives are compared. `of_bytes`: by the
    limits of kernels whose products are of 8 bits."""

    def __init__(self, spec: AttentionSpec, sample: Sample, params: Mapping[str, int | float], of_bytes: bool = False) -> None:
        self.spec = spec
        self._exact, self._single = (numbers_of(spec, sample, params, t) for t in (np.float64, np.float32))
        rounded = [replace(self._exact, rounding=Rounding(0, of_bytes=of_bytes))] if is_split(spec) or of_bytes else []
        self._inexact = (self._single, *rounded)
        heads = _some_heads(*sample.q.shape[:2]) if sample.q.size else []
        parts = _some_rows(sample.q.shape[2], sample.k.shape[2])
        self._parts = [self._part(b, h, rows) for b, h in heads for rows in parts]
        self._noticed: dict[Alternative, bool] = {}

    def _part(self, b: int, h: int, rows: slice) -> _Part:
        with np.errstate(all="ignore"):
            problems = (self._exact, *self._inexact)
            exact, *inexact = (Reference(*attention_rows(problem, b, h, rows)) for problem in problems)
        if not self.spec.lse:
            exact = Reference(exact.output, None)
        allowed = allowed_errors(self.spec, exact, inexact, self._exact.k.shape[2])
        return _Part((b, h, rows), Truth(exact, *allowed))

    def noticed(self, alternatives: Iterable[Alternative]) -> Iterator[Alternative]:
        """The alternatives whose results differ by more than a check allows."""
        for one in alternatives:
            if one not in self._noticed:
                with np.errstate(all="ignore"):
                    self._noticed[one] = any(self._differs(self._as(one), part) for part in self._parts)
            if self._noticed[one]:
                yield one

    def notices_pairs(self, b: int, h: int, allowed: Array, computed: Array) -> bool:
        """Whether the results of a head differ by more than a check allows if a kernel computes the pairs `computed` instead of
        those that the mask allows, both [q_len, kv_len]. Of each part's rows, one is compared: that of which most changes."""
        changed = (computed != allowed).sum(1) / np.maximum((computed | allowed).sum(1), 1)
        for part in self._parts:
            if part.place[:2] == (b, h) and changed[part.place[2]].any():
                row = part.place[2].start + int(changed[part.place[2]].argmax())
                with np.errstate(all="ignore"):
                    if self._differs(self._with_pairs(computed), part.of_row(row)):
                        return True
        return False

    def _with_pairs(self, computed: Array) -> Problem:
        """The problem with a mask that allows the pairs `computed`."""
        spec = self.spec
        pairs = Input("computed_pairs", DTYPES["bool"], ("q_len", "kv_len"))
        mask = gather(pairs.name, Type.BOOL, (name("q", Type.INT), name("k", Type.INT)))
        inputs = {**self._single.inputs, pairs.name: computed}
        return replace(self._single, spec=replace(spec, mask=mask, inputs=(*spec.inputs, pairs)), inputs=inputs)

    def _differs(self, problem: Problem, part: _Part) -> bool:
        output, lse = attention_rows(problem, *part.place)
        truth, exact = part.truth, part.truth.reference
        if max_error(output, exact.output) > MARGIN * truth.allowed:
            return True
        return lse is not None and exact.lse is not None and max_error(lse, exact.lse) > MARGIN * truth.allowed_lse

    def same_by_normalization(self, one: Alternative) -> bool:
        """Whether `one` adds the same number to all scores of a row. The softmax divides it away, so no result can show it."""
        spec = self.spec
        if one.keyword != "score" or spec.normalize != "softmax" or spec.lse or spec.sink is not None:
            return False
        with np.errstate(all="ignore"):
            shifts = [self._shift(one, part) for part in self._parts]
        return None not in shifts and any(shifts)

    def _shift(self, one: Alternative, part: _Part) -> float | None:
        """The largest number added to the scores of a row; None if the scores of some row change by different numbers."""
        place = part.place
        scores = score_rows(self._exact, *place)
        difference = score_rows(replace(self._as(one), q=self._exact.q, k=self._exact.k), *place) - scores
        if self.spec.mask is not None:
            difference = np.where(allowed_rows(self._exact, *place), difference, np.nan)
        if not np.isfinite(difference).any():
            return 0.0
        spread = np.fmax.reduce(difference, -1) - np.fmin.reduce(difference, -1)
        largest = float(np.nanmax(np.abs(difference)))
        return largest if np.nanmax(spread) <= 1e-9 * max(1.0, largest) else None

    def _as(self, one: Alternative) -> Problem:
        return replace(self._single, spec=one.spec, read=_read_anywhere)


def _some_heads(batch: int, heads: int) -> list[tuple[int, int]]:
    """The last batch and head, which show a wrong index of either, and three more."""
    corners = [(batch - 1, heads - 1), (0, 0), (batch - 1, 0), (0, heads - 1)]
    return list(dict.fromkeys(corners))


def _some_rows(q_len: int, kv_len: int) -> list[slice]:
    """All rows, or the first and the last of a large problem."""
    half = max(MAX_PAIRS // max(kv_len, 1) // 2, 1)
    return [slice(0, q_len)] if q_len <= 2 * half else [slice(0, half), slice(q_len - half, q_len)]


def _read_anywhere(problem: Problem, name: str, indices: tuple[Array, ...]) -> Array:
    """`read_input` for alternatives, which may read outside the tensor: such an index reads OUTSIDE."""
    array = problem.inputs[name]
    declared = problem.spec.input(name)
    at, inside = [], np.bool_(True)
    for i, size, dim in zip(indices, array.shape, declared.dims, strict=True):
        index = np.asarray(i * 0 if size == 1 and isinstance(dim, str) else i)
        inside = np.logical_and(inside, (index >= 0) & (index < size))
        at.append(np.clip(index, 0, size - 1))
    return np.where(inside, array[tuple(at)], np.asarray(OUTSIDE[array.dtype.kind], array.dtype))
