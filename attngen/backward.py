"""`CompiledBackward`: the gradients of a spec as a callable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from attngen.compiled import Compiled
from attngen.device.arrays import ArgumentError, ArrayView, empty_like
from attngen.device.lazy_kernel import DeferredKernel
from attngen.device.params import Number
from attngen.device.protocol import Device
from attngen.device.tuning_cache import found_for
from attngen.emit.emitter import emit
from attngen.emit.program import Program, evaluate
from attngen.plan.arch import Arch
from attngen.plan.facts import DETERMINISTIC, SpecFacts
from attngen.plan.plan import Schedule
from attngen.schedules import choice_of, choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import names_in
from attngen.spec.gradient import gradient_argument
from attngen.spec.scales import has_scale_forms


@dataclass(frozen=True, slots=True)
class CompiledBackward(Compiled):
    """The gradients `plan.wanted` of a spec.

    It takes arrays by the names of its program's inputs: q, k, v, the captured inputs, `dout`, `dlse` if lse is an output, and
    what `plan.saved` names of the forward's results.
    """

    def is_faster_in_order(self, q_len: int, kv_len: int) -> bool:
        """Whether gradients with the same bits in every run take no longer, for these numbers of queries and keys."""
        return _is_faster_in_order(self.plan.schedule, self.plan.facts, q_len, kv_len)

    def inputs_of(self, arrays: Mapping[str, ArrayView]) -> dict[str, ArrayView]:
        """Those of `arrays` that the program reads."""
        return {t.argument: arrays[t.argument] for t in self.source.of_role("input") if t.argument in arrays}

    def run(self, arrays: Mapping[str, ArrayView], params: Mapping[str, Number], stream: int | None = None) -> dict[str, Any]:
        """The gradients by the names of what they are gradients of; what `arrays` lacks of them is allocated.

        Raises ArgumentError.
        """
        bound = self.bind(arrays, params)
        bound.run(stream)
        return {name: bound.outputs[gradient_argument(name)] for name in self.plan.wanted}


@lru_cache(maxsize=4096)
def _is_faster_in_order(schedule: Schedule, facts: SpecFacts, q_len: int, kv_len: int) -> bool:
    return schedule.is_faster_in_order(facts, q_len, kv_len)


def compile_backward(
    spec: AttentionSpec,
    arch: Arch,
    device: Device,
    schedule: str | None,
    wanted: tuple[str, ...] | None,
    deterministic: bool = DETERMINISTIC,
) -> CompiledBackward:
    """The gradients `wanted` of a checked spec on `device`, on a GPU as tuned; compiled when they are first needed.

    Raises PlanRefusal, and GradientError if one of `wanted` has no gradient.
    """
    plan = choose(spec, arch, schedule, direction="backward", wanted=wanted, deterministic=deterministic)
    tuned = found_for(spec, plan) if device.name.startswith("cuda") else {}
    by_sizes = bool(choice_of(spec, arch, schedule, plan.wanted, deterministic).rules)
    # forms of the scale have other gradients of its params
    by_scale = has_scale_forms(spec) and names_in(spec.scale).isdisjoint(plan.wanted)
    return CompiledBackward(spec, plan, DeferredKernel(device, emit(spec, plan)), device, tuned, by_sizes, by_scale, schedule)


def zero_dlse(program: Program, arrays: Mapping[str, ArrayView]) -> ArrayView:
    """A gradient of lse that is 0, for calls without one."""
    (declared,) = [t for t in program.of_role("input") if t.argument == "dlse"]
    q = arrays["q"]
    names = ("batch", "q_heads", "q_len") if len(q.shape) == 4 else ("total_q", "q_heads")
    sizes = dict(zip(names, q.shape, strict=False))
    made = empty_like(q, tuple(evaluate(axis.size, sizes) for axis in declared.axes), DTYPES["fp32"], "dlse")
    made.owner[...] = 0
    return made


def check_dlse(spec: AttentionSpec, dlse: object, stream: int | None) -> None:
    """Raises ArgumentError for a `dlse` without an lse, or one that would have to be made on another stream."""
    if dlse is not None and not spec.lse:
        raise ArgumentError("`dlse` was given, but the spec has no `output lse`")
    if dlse is None and spec.lse and stream is not None:
        raise ArgumentError("`stream` was given without `dlse`; pass the gradient of lse too, or zeros if lse is not used")
