"""A problem of a check, by its sizes, params and draw, and what is computed of it when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from attngen.diagnostics import counted
from attngen.plan import Plan
from attngen.reference.compare import Truth, truth
from attngen.reference.compare_gradients import DRAWS, GradientTruth, gradient_truth
from attngen.reference.coverage import Exercise
from attngen.reference.definition import allowed_rows
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.numpy_oracle import Reference, numbers_of, numpy_attention
from attngen.reference.problems import USUAL, Array, Draw, Sample, Shape, sample
from attngen.reference.stored import PAGE_SIZE, Layout, of_lengths
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import round_to_storage

REMEMBERED = 64  # problems
FEW_DRAWS = 1  # draws of errors: a result within their bounds needs no others
Spoils = Literal["", "dout", "row of dO", "row of Q", "row of K"]
LAYOUTS: dict[Layout, str] = {
    "rows": "rows that are not aligned", "base": "an address that is not aligned", "columns": "columns that are not neighbours",
    "heads": "heads that are not aligned",
}  # fmt: skip
SPOILED: dict[Spoils, str] = {
    "dout": "NaN in a row of dO",
    "row of dO": "a row of dO of NaN",
    "row of Q": "a row of Q of NaN",
    "row of K": "a row of K of NaN",
}


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the problems of a check are held to; None is chosen."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    q_len: int | None = None
    kv_len: int | None = None
    params: Mapping[str, int | float] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0


class Setting(NamedTuple):
    """What a problem has beside its sizes and values, as `Trial` describes it."""

    multiprocessors: int = 0
    sections: bool = False
    laid_out: tuple[str, Layout] | None = None
    spoils: Spoils = ""
    lengths: tuple[tuple[int, int], ...] = ()
    page_size: int = PAGE_SIZE
    wrong_lengths: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """One problem. If its arrays are `apart`, each has strides of its own: gaps lie between the rows (`stored.apart`). If
    `multiprocessors` is not 0, the emulated device has as many: persistent blocks, and blocks over which keys are split. With
    `sections`, few heads are numbered together (`attngen.plan.heads_in_l2`). `laid_out` is an array by its name, and its layout
    (`stored.with_layout`). If it `spoils` something, that is the row in the middle, which is NaN; "dout": its ends in dO alone.

    With `lengths`, in packed, padded and paged storage, sequences have so many rows and keys; the shape has the longest. Pages
    have `page_size` rows, if it is not 0. With `wrong_lengths`, some numbers are outside of the tensors
    (`stored.with_wrong_lengths`)."""

    shape: Shape
    params: Mapping[str, int | float]
    seed: int = 0
    draw: Draw = USUAL
    apart: bool = field(default=False, compare=False)
    multiprocessors: int = field(default=0, compare=False)
    sections: bool = field(default=False, compare=False)
    laid_out: tuple[str, Layout] | None = field(default=None, compare=False)
    spoils: Spoils = ""
    lengths: tuple[tuple[int, int], ...] = ()
    page_size: int = field(default=0, compare=False)
    wrong_lengths: bool = field(default=False, compare=False)

    @property
    def setting(self) -> Setting:
        """What a `Case` says of it beside its sizes and values."""
        return Setting(
            self.multiprocessors,
            self.sections,
            self.laid_out,
            self.spoils,
            self.lengths,
            self.page_size or PAGE_SIZE,
            self.wrong_lengths,
        )

    def problem(self, spec: AttentionSpec) -> Sample:
        return _spoiled(sample(spec, self.shape, self.seed, self.draw), self.spoils, spec)

    def describe(self, spec: AttentionSpec) -> str:
        """Sizes and params in words, as `2 x 4 heads over 2, 129 rows, 33 keys, size 43`."""
        sizes = self.shape.sizes(spec)
        heads = f"{sizes['batch']} x {sizes['q_heads']} heads over {sizes['kv_heads']}"
        parts = [heads, f"{sizes['q_len']} rows", f"{sizes['kv_len']} keys"]
        parts += [f"{name} {sizes[name]}" for name in spec.free_dims]
        parts += [f"{p.name} {self.params[p.name]}" for p in spec.params if p.name in self.params]
        parts += ["strides of its own for each array"] if self.apart else []
        parts += [f"{LAYOUTS[self.laid_out[1]]} of {self.laid_out[0]}"] if self.laid_out else []
        parts += ["few heads numbered together"] if self.sections else []
        parts += [SPOILED[self.spoils]] if self.spoils else []
        parts += ["sequences of " + ", ".join(f"{rows} x {keys}" for rows, keys in self.lengths)] if self.lengths else []
        parts += [f"pages of {counted(self.page_size, 'row')}"] if self.page_size else []
        parts += ["lengths outside of the tensors"] if self.wrong_lengths else []
        parts += [f"{self.draw.scores} scores"] if self.draw.scores != "random" else []
        parts += [f"a device of {counted(self.multiprocessors, 'multiprocessor')}"] if self.multiprocessors else []
        return ", ".join(parts) + (f", Q times {self.draw.magnitude:g}" if self.draw.magnitude != 1 else "")


class Known:
    """One problem, and what is computed of it when it is needed."""

    def __init__(self, spec: AttentionSpec, trial: Trial, values: Sample | None = None) -> None:
        self.spec, self.trial, self.sample = spec, trial, values or trial.problem(spec)
        self._gradients: dict[tuple[Any, ...], GradientTruth] = {}

    @cached_property
    def of_lengths(self) -> dict[tuple[int, int], Known]:
        """The problem with all sequences of one length, by the lengths that they have."""
        alone = replace(self.trial, lengths=())
        every = dict.fromkeys(self.trial.lengths)
        return {lengths: Known(self.spec, alone, of_lengths(self.spec, self.sample, *lengths)) for lengths in every}

    @cached_property
    def exercise(self) -> Exercise:
        return Exercise(self.spec, self.sample, self.trial.params)

    @cached_property
    def hidden(self) -> tuple[Array, Array]:
        """The rows [batch, q_heads, q_len] without keys, and the keys [batch, kv_heads, kv_len] that no row sees."""
        (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = self.sample.q.shape, self.sample.k.shape
        pairs: Array = np.ones((batch, heads, q_len, kv_len), bool)
        if self.spec.mask is not None and pairs.size:
            numbers = numbers_of(self.spec, self.sample, self.trial.params, np.float32)
            with np.errstate(all="ignore"):
                for b, h in np.ndindex(batch, heads):
                    pairs[b, h] = allowed_rows(numbers, b, h, slice(0, q_len))
        of_groups: Array = pairs.reshape(batch, kv_heads, heads // max(kv_heads, 1), q_len, kv_len)
        return np.asarray(~pairs.any(3)), np.asarray(~of_groups.any((2, 3)))

    @cached_property
    def poisoned(self) -> Sample:
        """The problem with NaN in Q and K where the mask hides them: they leave no trace in a result. With sequences of several
        lengths, which `stored` arrays end with NaN, as it is."""
        if self.trial.lengths:
            return self.sample
        rows, keys = self.hidden
        return replace(self.sample, q=_with_nan(self.sample.q, rows, self.spec), k=_with_nan(self.sample.k, keys, self.spec))

    @cached_property
    def poisoned_loss(self) -> Loss:
        """The same of dO. A row without keys may have a sink, which has a gradient."""
        if self.spec.sink is not None:
            return self.loss
        return replace(self.loss, dout=_with_nan(self.loss.dout, self.hidden[0], self.spec))

    @cached_property
    def reference(self) -> Reference:
        return numpy_attention(self.spec, self.sample, self.trial.params)

    @cached_property
    def truth(self) -> Truth:
        return truth(self.spec, self.sample, self.trial.params, exact=self.reference)

    @cached_property
    def least_truth(self) -> Truth:
        """`truth` with bounds of few draws of errors, which take a fraction of the time: never larger ones."""
        return truth(self.spec, self.sample, self.trial.params, FEW_DRAWS, self.reference)

    @property
    def loss(self) -> Loss:
        loss = sample_loss(self.spec, self.sample, self.trial.seed)
        if self.trial.spoils not in ("dout", "row of dO"):
            return loss
        place: Array = np.zeros(loss.dout.shape, bool)
        place[:, :, spoiled_row(place.shape[2]), [0, -1] if self.trial.spoils == "dout" else slice(None)] = True
        return replace(loss, dout=_with_nan(loss.dout, place, self.spec))

    def gradients(self, plan: Plan) -> GradientTruth:
        """The gradients that `plan` computes, and their bounds."""
        return self._gradients_of(plan, DRAWS)

    def least_gradients(self, plan: Plan) -> GradientTruth:
        """The same with bounds of few draws of errors, as `least_truth`."""
        return self._gradients_of(plan, FEW_DRAWS)

    def _gradients_of(self, plan: Plan, draws: int) -> GradientTruth:
        key = (plan.wanted, plan.saved, draws)
        if key not in self._gradients:
            of = (self.spec, self.sample, self.loss, plan.wanted, self.trial.params, plan.saved)
            self._gradients[key] = gradient_truth(*of, draws)
        return self._gradients[key]

    def compute(self, plan: Plan) -> None:
        """Computes what the results of `plan` are first compared with."""
        for known in self.of_lengths.values() or (self,):
            _ = known.least_gradients(plan) if plan.wanted else known.least_truth


def spoiled_row(length: int) -> int:
    """The row of Q, K or dO that has NaN in a problem that spoils it."""
    return length // 2


def _spoiled(sample: Sample, spoils: Spoils, spec: AttentionSpec) -> Sample:
    """`sample` with NaN in Q or K."""
    if spoils not in ("row of Q", "row of K"):
        return sample
    array = sample.q if spoils == "row of Q" else sample.k
    place: Array = np.zeros(array.shape[:3], bool)
    place[:, :, spoiled_row(array.shape[2])] = True
    changed = _with_nan(array, place, spec)
    return replace(sample, q=changed) if spoils == "row of Q" else replace(sample, k=changed)


def _with_nan(array: Array, hidden: Array, spec: AttentionSpec) -> Array:
    """`array` with NaN in the rows that are `hidden`."""
    if not hidden.any():
        return array
    found = array.copy()
    found[hidden] = round_to_storage(np.full((), np.nan, np.float32), spec.dtype)
    return found


class Problems:
    """The latest problems of a spec, with their results: the schedules of a check share some, and a search asks again."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._latest: list[Known] = []

    def known(self, trial: Trial) -> Known:
        one = next((known for known in self._latest if known.trial == trial), None)
        if one is None:
            one = Known(self.spec, trial)
            self._latest = [one, *self._latest[: REMEMBERED - 1]]
        return one
