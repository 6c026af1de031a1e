"""What `check` and `trace` do before they run a kernel: plan it, refuse what no call takes, and compile it, or a file that
somebody has changed in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attngen.api import CompiledAttention
from attngen.device.binding import check_heads, check_params, refuse_unknown
from attngen.device.protocol import Device
from attngen.emit.emitter import emit
from attngen.plan import Plan, choose, find_arch
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.obligations import check_obligations


def plan_for(spec: AttentionSpec, rung: str, device: Device) -> Plan:
    """The planner's choice on `device`. Raises PlanRefusal."""
    arch = find_arch(device.arch)
    assert arch is not None, device.arch
    return choose(spec, arch, rung)


def check_call(spec: AttentionSpec, shape: Shape, params: Mapping[str, int | float]) -> None:
    """Refuse what every call of `spec` with these sizes and params refuses, before anything is compiled.

    Raises ArgumentError for a param or for numbers of heads, and ObligationError for an index or a divisor out of range.
    """
    refuse_unknown(list(params), [p.name for p in spec.params])
    values = check_params({p.name: (str(p.type), p.default) for p in spec.params}, params)
    sizes = shape.sizes(spec)
    check_heads(sizes)
    check_obligations(spec, sizes, values)


def compile_text(spec: AttentionSpec, plan: Plan, device: Device, text: str | None) -> CompiledAttention:
    """`spec` compiled for `device`, with `text`, if given, in the place of what is emitted: plan and launch rule stay.

    Raises what compiling raises.
    """
    source = emit(spec, plan)
    return CompiledAttention(spec, plan, device.compile(source if text is None else replace(source, text=text)), device)
