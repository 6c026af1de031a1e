"""`kernel` statements, and the plan of one, whatever the lengths of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from attngen.keywords import ScheduleName
from attngen.plan.arch import Arch
from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.plan import ROTATE_BEFORE, Decision, Plan, Schedule, refusal
from attngen.plan.tile import Tile
from attngen.schedules.hopper import HOPPER
from attngen.schedules.registry import FUSED, UNFUSED, automatic, keywords_of, schedule_of, schedules_of
from attngen.spec.attention import KernelRequest, QPlace


def stated(kernel: KernelRequest, tile: Tile, q: QPlace | None = None) -> KernelRequest:
    """A `kernel` statement without overrides, and with those of a tile and of the place of Q."""
    return replace(kernel, block_q=tile.block_q, block_kv=tile.block_kv, stages=tile.stages, warps=tile.warps, q=q)


def overridden(kernel: KernelRequest, schedule: str | None) -> KernelRequest:
    """The request of a call or command that names `schedule`. The overrides apply only to the stated schedule; those stated for
    "auto" apply to every schedule of a single kernel."""
    if schedule is None or schedule == kernel.schedule:
        return kernel
    keyword = cast(ScheduleName, schedule)
    of_one_kernel = kernel.schedule == "auto" and schedule not in UNFUSED
    return replace(kernel, schedule=keyword) if of_one_kernel else kernel.bare(keyword)


@remembered
def plan_of(facts: SpecFacts, arch: Arch) -> Plan:
    """The plan for the `kernel` statement of the facts' spec. Raises PlanRefusal."""
    kernel = facts.spec.kernel
    chosen = schedule_of(facts, arch, automatic(facts, arch) if kernel.schedule == "auto" else kernel.schedule)
    _refuse_unsuitable(chosen, facts, arch)
    plan = chosen.plan(facts, arch)
    if kernel.q not in (None, plan.q_place):
        what = f"q {kernel.q} does not fit this {chosen.keyword} kernel"
        raise refusal("kernel", what, f"q is {plan.q_place or 'no choice of this schedule'}", "leave `q` to the planner")
    first = (*_not_fused(chosen, facts, arch), *_not_first(chosen, facts, arch))
    return replace(plan, decisions=(*first, *plan.decisions, *_not_hopper(chosen, facts, arch)))


NO_OTHER = {  # what to do about a statement that suits no schedule
    "head_dim": "no schedule has such heads: use a smaller head size",
    "dtype": "no schedule has them: state one type for K and V",
    "rotary": ROTATE_BEFORE,
}
NO_GRADIENTS = NO_OTHER | {  # and its gradients
    "dtype": "no schedule has gradients of tensors of several element types: state one for all",
    "scaled v": "no schedule has gradients beside a scale of V: multiply V before the call",
}


def _refuse_unsuitable(chosen: Schedule, facts: SpecFacts, arch: Arch) -> None:
    """Raise PlanRefusal if head sizes, element types, gradients or a storage do not suit; a schedule says the rest itself."""
    for statement, reason in chosen.limits(facts.spec):
        others = ", ".join(keywords_of(facts, arch))
        what = f"`{statement}` of attention `{facts.spec.name}` does not suit the {chosen.keyword} schedule"
        raise refusal(statement, what, reason, _instead(statement, others, facts))
    if not (facts.wanted or facts.spec.kernel.storage != "dense") or not (reason := chosen.reason_against(facts, arch)):
        return
    others = ", ".join(keywords_of(facts, arch))
    schedule_is = f"the {'backward of the ' if facts.wanted else ''}{chosen.keyword} schedule"
    what = f"{schedule_is} does not suit attention `{facts.spec.name}` on {arch.name}"
    cure = "compute these gradients by" if facts.wanted else "use"
    raise refusal("kernel", what, reason, f"{cure} auto, or one of: {others}" if others else "use dense storage")


def _instead(statement: str, others: str, facts: SpecFacts) -> str:
    if others:
        return f"use kernel auto, or one of: {others}"
    return (NO_GRADIENTS if facts.wanted else NO_OTHER)[statement]


def _not_first(chosen: Schedule, facts: SpecFacts, arch: Arch) -> Iterator[Decision]:
    """Why `chosen` computes what a schedule that its keyword prefers does not; nothing if `chosen` is for everything else."""
    first = next(s for s in schedules_of(facts) if s.keyword == chosen.keyword)
    if first is not chosen and chosen.in_return:
        yield Decision("schedule", chosen.name, f"{first.reason_against(facts, arch)}: {chosen.in_return}")


def _not_fused(chosen: Schedule, facts: SpecFacts, arch: Arch) -> Iterator[Decision]:
    """Why "auto" takes no schedule that keeps scores on the chip."""
    if facts.spec.kernel.schedule != "auto" or chosen.is_fused:
        return
    if limits := dict(schedule_of(facts, arch, FUSED).limits(facts.spec)):
        yield Decision("by auto", chosen.keyword, f"not {FUSED}: {', '.join(limits.values())}")


def _not_hopper(chosen: Schedule, facts: SpecFacts, arch: Arch) -> Iterator[Decision]:
    """Why "auto" does not take hopper for keys in pages."""
    kernel = facts.spec.kernel
    if kernel.is_paged and kernel.schedule == "auto" and chosen.keyword != HOPPER.keyword and arch.has(*HOPPER.needs):
        yield Decision("by auto", f"{chosen.keyword}, not hopper", HOPPER.reason_against(facts, arch))
