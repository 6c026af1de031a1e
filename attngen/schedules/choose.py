"""spec + architecture -> Plan, by the schedule that the spec, the caller or the architecture asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from attngen.plan.arch import Arch
from attngen.plan.captured_sums import sizes_of_pairs
from attngen.plan.decisions import WHY_LSE_REST
from attngen.plan.facts import DETERMINISTIC, SpecFacts, facts_of
from attngen.plan.formulas import SYMBOLS
from attngen.plan.memo import remembered
from attngen.plan.plan import Decision, Direction, Plan
from attngen.plan.problem import Problem
from attngen.plan.saved import needs_lse_rest
from attngen.schedules.one_plan import overridden, plan_of
from attngen.schedules.registry import AUTOMATIC, automatic
from attngen.schedules.rules import Rule, rules_of
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.gradient import QKV, wanted_gradients
from attngen.spec.names import check_backward_names


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The choice for a spec on an architecture: one plan for all lengths, or one of several by the lengths of a call."""

    usual: Plan  # if the lengths are unknown
    rules: tuple[Rule, ...]  # in order; none: one tile of `usual`'s schedule is for all lengths

    def at(self, problem: Problem, saves_lse: bool = False) -> Plan:
        """The plan for these lengths; with `saves_lse`, one whose schedule has a backward. Lengths that were not seen before
        cost a comparison of a few tiles, whose plans are made once."""
        return _at(self, problem, saves_lse) if self.rules else self.usual

    def conditions(self, saves_lse: bool = False) -> tuple[tuple[bool, Plan], ...]:
        """What `at` selects by rules that are formulas (`attngen.plan.formulas`): conditions over the sizes of a call, in the
        order in which they are tried, with their plans. The last is the usual plan, for all other calls."""
        problem = Problem.of(SYMBOLS)
        found = [
            (condition, _of_point(self, rule, point))
            for rule in self.rules
            if rule.cases is not None and (rule.has_backward or not saves_lse)
            for condition, point in rule.cases(problem)
        ]
        saving = saves_lse and self.usual.facts.spec.normalize == "softmax"
        return tuple((condition, _saving_lse(plan) if saving else plan) for condition, plan in (*found, (True, self.usual)))

    def has_own(self, problem: Problem) -> bool:
        """Whether these lengths have a plan of their own, not a tile of `usual`'s schedule."""
        return any(rule.is_special and rule.when(problem) is not None for rule in self.rules)

    def plans(self) -> tuple[Plan, ...]:
        """Every plan that `at` may return, `usual` first."""
        found = {(self.usual.keyword, self.usual.tile): self.usual}
        for rule in self.rules:
            for plan in (_of_point(self, rule, point) for point in rule.points):
                found.setdefault((plan.keyword, plan.tile), plan)
        return tuple(found.values())


@lru_cache(maxsize=4096)
def _at(choice: Choice, problem: Problem, saves_lse: bool) -> Plan:
    for rule in choice.rules:
        point = rule.when(problem) if rule.has_backward or not saves_lse else None
        if point is not None:
            return _of_point(choice, rule, point)
    return choice.usual


@remembered
def _of_point(choice: Choice, rule: Rule, point: object) -> Plan:
    return rule.plan(choice.usual, point)


def choose(
    spec: AttentionSpec,
    arch: Arch,
    schedule: str | KernelRequest | None = None,
    problem: Problem | None = None,
    saves_lse: bool = False,
    *,
    direction: Direction | None = None,
    wanted: Iterable[str] | None = None,
    deterministic: bool = DETERMINISTIC,
) -> Plan:
    """The plan for `spec` on `arch`, and for the lengths of `problem` if these are known. `schedule` overrides the spec's own
    `kernel` statement (`overridden`), and a KernelRequest replaces it; "auto" is
    `automatic`. With `saves_lse`, a softmax also writes the lse that the backward recomputes weights from, which changes no
    other choice.

    With `wanted`, or with direction "backward", it is the plan of a backward that computes the gradients `wanted`, by default
    those of q, k and v. The tile, stages and warps that a spec states are those of its forward, those of a KernelRequest are
    the backward's. Gradients that need not be `deterministic` may differ in their last bits between runs, where that is faster.

    Raises PlanRefusal if an override of the spec does not fit, or the architecture lacks what the schedule needs, and
    GradientError if one of `wanted` has no gradient.
    """
    gradients = _gradients(spec, direction, wanted)
    choice = choice_of(spec, arch, schedule, gradients, deterministic)
    plan = choice.usual if problem is None else choice.at(problem, saves_lse)
    return _saving_lse(plan) if saves_lse and not gradients and spec.normalize == "softmax" else plan


@remembered
def _saving_lse(plan: Plan) -> Plan:
    """`plan` with an lse for the backward. One that is the spec's output is exact instead, at the cost of the fast softmax."""
    spec, because = plan.facts.spec, {}
    if not spec.lse:
        because["lse"] = "of the sums that divide O, in which weights may be rounded: the backward rounds them too"
    if plan.schedule.is_fused and needs_lse_rest(spec):
        because["lse_rest"] = WHY_LSE_REST
    decisions = (Decision(name, "saved", why) for name, why in because.items())
    return replace(plan, saved=tuple(because), decisions=(*plan.decisions, *decisions))


def _gradients(spec: AttentionSpec, direction: Direction | None, wanted: Iterable[str] | None) -> tuple[str, ...]:
    """The gradients that a plan computes; none for a forward. Raises GradientError."""
    if (direction or ("backward" if wanted else "forward")) == "forward":
        return ()
    check_backward_names(spec)
    return wanted_gradients(spec, wanted)


def choice_of(
    spec: AttentionSpec,
    arch: Arch,
    schedule: str | KernelRequest | None = None,
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Choice:
    """The part of `choose` that does not depend on lengths. Raises PlanRefusal."""
    return _choice_of(spec, arch, schedule, wanted, deterministic)


@remembered  # by all arguments, however a caller gives them: a spec has one Choice
def _choice_of(
    spec: AttentionSpec, arch: Arch, schedule: str | KernelRequest | None, wanted: tuple[str, ...], deterministic: bool
) -> Choice:
    facts = _facts(spec, schedule, wanted, deterministic)
    usual = plan_of(facts, arch)
    rules = rules_of(usual)
    decisions = (*usual.decisions, *(rule.note for rule in reversed(rules) if rule.note is not None))
    first, *rest = parts_of(spec, arch, schedule, wanted, deterministic)
    if rest:
        because = (
            f"calls compute those of {', '.join(first)} by themselves, which takes less time than this one program for all"
        )
        decisions = (Decision("by auto", "gradients in two programs", because), *decisions)
    return Choice(replace(usual, decisions=decisions), rules)


def parts_of(
    spec: AttentionSpec,
    arch: Arch,
    schedule: str | KernelRequest | None,
    wanted: tuple[str, ...],
    deterministic: bool = DETERMINISTIC,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """The gradients `wanted` in parts that have a program each, for "auto": those of q, k and v by themselves if a preferred
    schedule computes these alone, as hopper does of most specs, then those of captured tensors. Otherwise all are one part.
    `shapes` are those of the call's arrays: hopper computes the gradient of a tensor that has one element for each pair, and by
    default each may have."""
    parts = [part for part in (tuple(n for n in wanted if n in QKV), tuple(n for n in wanted if n not in QKV)) if part]
    if len(parts) < 2:
        return (wanted,)
    of_all, of_first = (_facts(spec, schedule, w, deterministic) for w in (wanted, parts[0]))
    if of_all.spec.kernel.schedule != "auto":
        return (wanted,)
    by_all, by_first = (AUTOMATIC.index(automatic(facts, arch)) for facts in (of_all, of_first))
    if by_first == by_all and shapes:
        is_one = _fit_pairs(plan_of(of_all, arch), shapes)
        return (wanted,) if is_one else tuple(parts)
    return tuple(parts) if by_first < by_all else (wanted,)


def _fit_pairs(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the captured tensors whose gradients are dS have one element for each pair of a call, by its arrays' shapes."""
    assert plan.facts.gradient is not None
    sizes = dict(zip(("batch", "q_heads", "q_len"), shapes["q"], strict=False))
    sizes |= dict(zip(("batch", "kv_heads", "kv_len"), shapes["k"], strict=False))
    expected = {n: tuple(sizes.get(s) for s in sizes_of_pairs(plan.facts.gradient.of(n))) for n in plan.written_pairs}
    return all(tuple(shapes[name]) == wanted for name, wanted in expected.items())


def _facts(
    spec: AttentionSpec, schedule: str | KernelRequest | None, wanted: tuple[str, ...], deterministic: bool
) -> SpecFacts:
    """The facts of the spec with the `kernel` statement to plan for."""
    if isinstance(schedule, KernelRequest):
        kernel = replace(schedule, storage=spec.kernel.storage, page_size=spec.kernel.page_size)
    else:
        kernel = overridden(spec.kernel, schedule)
        kernel = kernel.bare() if wanted else kernel
    return facts_of(replace(spec, kernel=kernel), wanted, deterministic)


def plans_for(spec: AttentionSpec, arch: Arch, schedule: str | None = None) -> tuple[Plan, ...]:
    """Every plan of a forward that `choose` may return for `spec`, whatever the lengths of a call."""
    return choice_of(spec, arch, schedule).plans()
