"""A generated file that somebody has changed, in the place of the kernel that its spec and plan give."""

from __future__ import annotations

from dataclasses import replace

from attngen.api import CompiledAttention
from attngen.device.protocol import Device
from attngen.emit.emitter import emit
from attngen.plan import Plan, choose, find_arch
from attngen.spec.attention import AttentionSpec


def plan_for(spec: AttentionSpec, rung: str, device: Device) -> Plan:
    """The planner's choice on `device`. Raises PlanRefusal."""
    arch = find_arch(device.arch)
    assert arch is not None, device.arch
    return choose(spec, arch, rung)


def compile_text(spec: AttentionSpec, plan: Plan, device: Device, text: str | None) -> CompiledAttention:
    """`spec` compiled for `device`, with `text`, if given, in the place of what is emitted: plan and launch rule stay.

    Raises what compiling raises.
    """
    source = emit(spec, plan)
    return CompiledAttention(spec, plan, device.compile(source if text is None else replace(source, text=text)), device)
