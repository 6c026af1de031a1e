"""What is computed of a problem of a check when it is needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from attngen.inspect.trial import Trial, spoiled_row, with_nan, with_nan_in_keys
from attngen.plan import Plan
from attngen.reference.compare import MOST_DRAWS, Truth, truth
from attngen.reference.compare_gradients import GradientTruth, gradient_truth
from attngen.reference.coverage import Exercise
from attngen.reference.definition import allowed_rows
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.numpy_oracle import Reference, numbers_of, numpy_attention
from attngen.reference.problems import Array, Sample
from attngen.reference.stored import of_lengths
from attngen.spec.attention import AttentionSpec

REMEMBERED = 64  # problems
FEW_DRAWS = 1  # draws of errors: a result within their bounds needs no others


class Known:
    """One problem, and what is computed of it when it is needed."""

    def __init__(self, spec: AttentionSpec, trial: Trial, values: Sample | None = None) -> None:
        self.spec, self.trial, self.sample = spec, trial, values or trial.problem(spec)
        self._exercises: dict[bool, Exercise] = {}
        self._truths: dict[tuple[bool, int], Truth] = {}
        self._gradients: dict[tuple[object, ...], GradientTruth] = {}

    @cached_property
    def of_lengths(self) -> dict[tuple[int, int], Known]:
        """The problem with all sequences of one length, by the lengths that they have."""
        alone = self.trial.having(lengths=())
        every = dict.fromkeys(self.trial.setting.lengths)
        return {lengths: Known(self.spec, alone, of_lengths(self.spec, self.sample, *lengths)) for lengths in every}

    def exercise(self, plan: Plan) -> Exercise:
        """The parts of the spec that the problem exercises, by the limits of errors of `plan`."""
        of_bytes = plan.schedule.multiplies_bytes
        if of_bytes not in self._exercises:
            self._exercises[of_bytes] = Exercise(self.spec, self.sample, self.trial.params, of_bytes)
        return self._exercises[of_bytes]

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
        if self.trial.setting.lengths:
            return self.sample
        rows, keys = self.hidden
        return replace(self.sample, q=with_nan(self.sample.q, rows), k=with_nan_in_keys(self.spec, self.sample.k, keys))

    @cached_property
    def poisoned_loss(self) -> Loss:
        """The same of dO. A row without keys may have a sink, which has a gradient."""
        if self.spec.sink is not None:
            return self.loss
        return replace(self.loss, dout=with_nan(self.loss.dout, self.hidden[0]))

    @cached_property
    def reference(self) -> Reference:
        return numpy_attention(self.spec, self.sample, self.trial.params)

    def truth(self, plan: Plan, draws: int = MOST_DRAWS) -> Truth:
        """The result, and the largest errors allowed to `plan`, by so many draws of errors. FEW_DRAWS take a fraction of the
        time, and their bounds are never larger."""
        key = (plan.schedule.multiplies_bytes, draws)
        if key not in self._truths:
            of = (self.spec, self.sample, self.trial.params, draws, self.reference)
            self._truths[key] = truth(*of, of_bytes=plan.schedule.multiplies_bytes)
        return self._truths[key]

    @property
    def loss(self) -> Loss:
        loss, spoils = sample_loss(self.spec, self.sample, self.trial.seed), self.trial.setting.spoils
        if spoils not in ("dout", "row of dO"):
            return loss
        place: Array = np.zeros(loss.dout.shape, bool)
        place[:, :, spoiled_row(place.shape[2]), [0, -1] if spoils == "dout" else slice(None)] = True
        return replace(loss, dout=with_nan(loss.dout, place))

    def gradients(self, plan: Plan, draws: int) -> GradientTruth:
        """The gradients that `plan` computes, and their bounds by so many draws of errors."""
        key = (plan.wanted, plan.saved, draws)
        if key not in self._gradients:
            of = (self.spec, self.sample, self.loss, plan.wanted, self.trial.params, plan.saved)
            self._gradients[key] = gradient_truth(*of, draws)
        return self._gradients[key]

    def compute(self, plan: Plan) -> None:
        """Computes what the results of `plan` are first compared with."""
        for known in self.of_lengths.values() or (self,):
            _ = known.gradients(plan, FEW_DRAWS) if plan.wanted else known.truth(plan, FEW_DRAWS)


class Problems:
    """The latest problems of a spec, with their results: the schedules of a check share some, and a search asks again."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._latest: list[Known] = []

    def known(self, trial: Trial) -> Known:
        one = next((known for known in self._latest if known.trial.problem_key == trial.problem_key), None)
        if one is None:
            one = Known(self.spec, trial)
            self._latest = [one, *self._latest[: REMEMBERED - 1]]
        return one
