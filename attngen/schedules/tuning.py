"""The space of choices of a schedule as `kernel` statements, and the plan of one that tuning found."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from attngen.diagnostics import counted
from attngen.keywords import ScheduleName
from attngen.plan.arch import Arch
from attngen.plan.facts import DETERMINISTIC, facts_of
from attngen.plan.plan import Decision, Plan, PlanRefusal, stated_by
from attngen.schedules.choose import choose
from attngen.schedules.one_plan import stated
from attngen.schedules.registry import schedule_of
from attngen.spec.attention import AttentionSpec, KernelRequest, QPlace


def candidates(
    spec: AttentionSpec,
    arch: Arch,
    keyword: ScheduleName = "fused",
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> tuple[KernelRequest, ...]:
    """The `kernel` statements that fit the registers and the shared memory of `arch`: each tile, with each place of Q that it
    leaves open; of the forward, or of the backward with the gradients `wanted`."""
    facts = facts_of(spec, wanted, deterministic)
    schedule = schedule_of(facts, arch, keyword)
    return tuple(
        stated(spec.kernel.bare(keyword), t, q)
        for t in schedule.tiles(schedule.as_read(facts), arch)
        for q in (get_args(QPlace) if schedule.holds_q(schedule.as_read(facts), arch, t) else (None,))
    )


def request_of(plan: Plan) -> KernelRequest:
    """The `kernel` statement that states all that `candidates` vary."""
    q = plan.q_place if plan.schedule.holds_q(plan.schedule.as_read(plan.facts), plan.arch, plan.tile) else None
    return stated(plan.facts.spec.kernel.bare(plan.keyword), plan.tile, q)


def alternatives(planned: Plan) -> dict[KernelRequest, Plan]:
    """The plan of each choice that fits, of the schedule, spec and gradients of `planned`, which comes first."""
    facts, arch = planned.facts, planned.arch
    found = candidates(facts.spec, arch, planned.keyword, facts.wanted, facts.deterministic)
    requests = dict.fromkeys((request_of(planned), *found))
    return {r: choose(facts.spec, arch, r, wanted=facts.wanted, deterministic=facts.deterministic) for r in requests}


def title_of(kernel: KernelRequest) -> str:
    """What tuning varies of a `kernel` statement, in words."""
    assert kernel.stages is not None
    assert kernel.warps is not None
    size = f"{kernel.block_q} x {kernel.block_kv}, {counted(kernel.stages, 'stage')}, {counted(kernel.warps, 'warp')}"
    return f"{size}, Q {kernel.q}" if kernel.q else size


def tuned_plan(plan: Plan, kernel: KernelRequest, decision: Decision) -> Plan:
    """`plan` with the tile, stages and warps of `kernel`, which tuning found, and `decision` first.

    `plan` itself if they do not fit: another version of attngen found them.
    """
    facts, saves_lse = plan.facts, bool(plan.saved)
    try:
        found = choose(facts.spec, plan.arch, kernel, None, saves_lse, wanted=facts.wanted, deterministic=facts.deterministic)
    except PlanRefusal:
        return plan
    return replace(found, decisions=(decision, *stated_by(found.decisions, "tuned")))
