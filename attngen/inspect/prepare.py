"""Preparation of `check` and `trace`: plan a kernel, refuse invalid calls, compile the kernel or a changed file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.device.params import check_params, declared_params, refuse_unknown
from attngen.device.protocol import Device
from attngen.emit.emitter import emit
from attngen.plan import ARCHES, Plan
from attngen.plan.facts import DETERMINISTIC
from attngen.reference.problems import Shape
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.obligations import check_obligations


def plan_for(
    spec: AttentionSpec,
    schedule: str,
    device: Device,
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Plan:
    """The planner's choice on `device`: of a forward, or of the backward that computes the gradients `wanted`.

    Raises PlanRefusal, GradientError.
    """
    return choose(spec, ARCHES[device.arch], schedule, wanted=wanted, deterministic=deterministic)


def check_call(spec: AttentionSpec, shape: Shape, params: Mapping[str, int | float]) -> None:
    """Refuses sizes and params that a call of `spec` would refuse, before anything is compiled.

    Raises ArgumentError for a param or for numbers of heads, and ObligationError for an index or a divisor out of range.
    """
    refuse_unknown(list(params), [p.name for p in spec.params])
    check_obligations(spec, shape.sizes(spec), values_of(spec, params))


def values_of(spec: AttentionSpec, params: Mapping[str, int | float]) -> dict[str, int | float]:
    """The value of each of the spec's params. Raises ArgumentError."""
    declared = declared_params(spec)
    return check_params({name: declared[name] for name in declared if name not in spec.kernel.longest}, params)


def compile_text(spec: AttentionSpec, plan: Plan, device: Device, text: str | None) -> CompiledAttention | CompiledBackward:
    """`plan` of `spec` compiled for `device`; `text` replaces the emitted CUDA, with the same plan and launch rule.

    Raises the exceptions of compiling.
    """
    compiled = CompiledBackward if plan.direction == "backward" else CompiledAttention
    source = emit(spec, plan)
    return compiled(spec, plan, device.compile(source if text is None else replace(source, text=text)), device)
