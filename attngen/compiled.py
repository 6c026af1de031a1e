"""`Compiled`: what compiled forwards and backwards share, a program that is bound to arrays by the plan for a call's sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from attngen.device.arrays import ArrayView
from attngen.device.binding import Bound, bind, sizes_of
from attngen.device.compiled_templates import keep_compiled_templates
from attngen.device.lazy_kernel import DeferredKernel
from attngen.device.params import Number, check_params, declared_params, number_names
from attngen.device.protocol import Device, Kernel
from attngen.device.tuning_cache import Bucket, Winner, bucket_of
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.plan import Plan, Problem
from attngen.schedules import choose, tuned_plan
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type
from attngen.spec.obligations import check_obligations
from attngen.spec.scales import ScaleForm, scale_form, with_scale_form

keep_compiled_templates()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan of a spec with its kernel. `tuned` has the winners of `attngen tune` by the sizes of a call. If it is planned
    `by_sizes`, calls take what `choose` returns for their sizes and `schedule`, the one that the caller named; `by_scale`, the
    form of the spec for their scale (`attngen.spec.scales`)."""

    spec: AttentionSpec
    plan: Plan
    kernel: Kernel
    device: Device
    tuned: Mapping[Bucket, Winner] = field(default_factory=dict, repr=False, compare=False)
    by_sizes: bool = field(default=False, repr=False, compare=False)
    by_scale: bool = field(default=False, repr=False, compare=False)
    schedule: str | None = field(default=None, repr=False, compare=False)
    _others: dict[Hashable, Self] = field(
        default_factory=dict, repr=False, compare=False
    )  # the same for other sizes, or scales

    @property
    def source(self) -> Program:
        """The generated CUDA and its ABI."""
        return self.kernel.source

    def number_names(self, kind: Type) -> tuple[str, ...]:
        """The arguments of a call that are numbers of a type."""
        return number_names(self.spec, kind)

    def bind(self, arrays: Mapping[str, ArrayView], params: Mapping[str, Number]) -> Bound:
        """A call with `arrays`, the inputs and outputs by the names of their arguments, by the kernel for its sizes.

        Raises ArgumentError, and ObligationError for an index or a divisor out of range.
        """
        params = check_params(declared_params(self.spec), params)
        longest = {name: params[name] for name in self.spec.kernel.longest}
        sizes = sizes_of(self.source, self.device, arrays, longest)
        check_obligations(self.spec, sizes, params)
        return bind(self.of_scale(params).at(sizes).kernel, sizes, arrays, params)

    def of_scale(self, params: Mapping[str, Number]) -> Self:
        """This with the form of the spec for the scale of a call, which may be this one."""
        form = scale_form(self.spec, params) if self.by_scale else "stated"
        return self if form == "stated" else self._other(form, lambda: self._of_form(form))

    def _other(self, key: Hashable, make: Callable[[], Self]) -> Self:
        """What `make` returned when `key` was first needed."""
        if key not in self._others:
            self._others[key] = make()
        return self._others[key]

    def _of_form(self, form: ScaleForm) -> Self:
        spec = with_scale_form(self.spec, form)
        found = self._choose(spec, None)
        kernel = DeferredKernel(self.device, emit(spec, found))
        return replace(self, spec=spec, plan=found, kernel=kernel, by_scale=False, _others={})

    def at(self, sizes: Mapping[str, int]) -> Self:
        """This planned for the sizes of a call: as tuned, else as the planner chooses, which may be this plan.

        A plan that no call has needed before is compiled now.
        """
        bucket = bucket_of(sizes)
        if bucket not in self.tuned:
            return self._chosen(sizes)
        winner = self.tuned[bucket]
        return self._other(bucket, lambda: self._with(tuned_plan(self.plan, winner.kernel, winner.decision)))

    def _chosen(self, sizes: Mapping[str, int]) -> Self:
        """This with the planner's choice for the sizes of a call."""
        if not self.by_sizes:
            return self
        found = self._choose(self.spec, Problem.of({"multiprocessors": self.device.multiprocessors, **sizes}))
        key = found.keyword, found.tile
        return self if key == (self.plan.keyword, self.plan.tile) else self._other(key, lambda: self._with(found))

    def _choose(self, spec: AttentionSpec, problem: Problem | None) -> Plan:
        """The plan of `spec`, which is this one's but for the form of its scale, as this was planned."""
        plan = self.plan
        said = {"direction": plan.direction, "wanted": plan.wanted or None, "deterministic": plan.facts.deterministic}
        return choose(spec, plan.arch, self.schedule, problem, bool(plan.saved), **said)  # type: ignore[arg-type]

    def _with(self, plan: Plan) -> Self:
        if plan is self.plan:
            return self
        return type(self)(self.spec, plan, self.device.compile(emit(self.spec, plan)), self.device)
