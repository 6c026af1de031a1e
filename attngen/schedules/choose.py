"""spec + architecture -> Plan, by the schedule that the spec, the caller or the architecture asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from attngen.diagnostics import counted
from attngen.plan.arch import DEFAULT_ARCH, Arch
from attngen.plan.captured_sums import sizes_of_pairs
from attngen.plan.decisions import WHY_LSE_REST
from attngen.plan.facts import DETERMINISTIC, SpecFacts, facts_of
from attngen.plan.memo import remembered
from attngen.plan.plan import Decision, Direction, Plan, PlanRefusal, Schedule, TileChoice, refusal
from attngen.plan.problem import Problem
from attngen.plan.saved import needs_lse_rest
from attngen.plan.tile import Tile
from attngen.plan.tile_search import STATED
from attngen.schedules import short_rows
from attngen.schedules.decode import DECODE
from attngen.schedules.decode import plan as decode
from attngen.schedules.fused_mma import FUSED_MMA
from attngen.schedules.fused_simt import FUSED_SIMT
from attngen.schedules.hopper import HOPPER
from attngen.schedules.hopper.plan import NEEDED
from attngen.schedules.naive import NAIVE
from attngen.schedules.short_rows import ShortRows
from attngen.schedules.tiled import TILED
from attngen.schedules.wgmma import WGMMA
from attngen.spec.attention import HOPPER_SCHEDULES, AttentionSpec, KernelRequest, QPlace, ScheduleName
from attngen.spec.gradient import QKV, wanted_gradients
from attngen.spec.names import check_backward_names

# In order of preference under one keyword.
SCHEDULES: tuple[Schedule, ...] = (NAIVE, TILED, FUSED_MMA, FUSED_SIMT, WGMMA, HOPPER, DECODE)
FUSED: ScheduleName = "fused"
AUTOMATIC: tuple[ScheduleName, ...] = ("hopper", FUSED)  # "auto" is the first that suits: the least work, and O(S) memory
AUTOMATIC_BACKWARD: tuple[ScheduleName, ...] = (*AUTOMATIC, "tiled", "naive")


def schedules_of(facts: SpecFacts) -> tuple[Schedule, ...]:
    """The schedules of the direction that `facts` are for."""
    if not facts.wanted:
        return SCHEDULES
    from attngen.schedules.backward import BACKWARD_SCHEDULES  # imported late: most commands need none

    return BACKWARD_SCHEDULES


def schedule_of(facts: SpecFacts, arch: Arch, keyword: ScheduleName) -> Schedule:
    """The schedule that `keyword` stands for; one that does not suit if there is no other: it refuses with the reason.

    Raises PlanRefusal if the keyword has no backward.
    """
    named = [s for s in schedules_of(facts) if s.keyword == keyword]
    if not named:
        others = ", ".join(dict.fromkeys(s.keyword for s in schedules_of(facts)))
        what = f"the {keyword} schedule has no backward"
        raise refusal(
            "kernel", what, f"the call requests gradients by {keyword}", f"compute gradients by auto, or one of: {others}"
        )
    return next((s for s in named if s.suits(facts, arch)), named[-1])


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
        _stated(spec, keyword, t, q)
        for t in schedule.tiles(facts, arch)
        for q in (get_args(QPlace) if schedule.holds_q(facts, arch, t) else (None,))
    )


def request_of(plan: Plan) -> KernelRequest:
    """The `kernel` statement that states all that `candidates` vary."""
    q = plan.q_place if plan.schedule.holds_q(plan.facts, plan.arch, plan.tile) else None
    return _stated(plan.facts.spec, plan.keyword, plan.tile, q)


def alternatives(planned: Plan) -> dict[KernelRequest, Plan]:
    """The plan of each point of the space of choices of `planned`'s schedule that fits: of its spec, direction and gradients,
    `planned` first."""
    facts, arch = planned.facts, planned.arch
    said = {"direction": planned.direction, "wanted": planned.wanted, "deterministic": facts.deterministic}
    found = [request_of(planned), *candidates(facts.spec, arch, planned.keyword, planned.wanted, facts.deterministic)]
    return {r: choose(facts.spec, arch, r, **said) for r in dict.fromkeys(found)}  # type: ignore[arg-type]


def title_of(kernel: KernelRequest) -> str:
    """What tuning varies of a `kernel` statement, in words."""
    assert kernel.stages is not None
    assert kernel.warps is not None
    size = f"{kernel.block_q} x {kernel.block_kv}, {counted(kernel.stages, 'stage')}, {counted(kernel.warps, 'warp')}"
    return f"{size}, Q {kernel.q}" if kernel.q else size


def _stated(spec: AttentionSpec, keyword: ScheduleName, tile: Tile, q: QPlace | None) -> KernelRequest:
    bare = spec.kernel.bare(keyword)
    return replace(bare, block_q=tile.block_q, block_kv=tile.block_kv, stages=tile.stages, warps=tile.warps, q=q)


def automatic(facts: SpecFacts, arch: Arch) -> ScheduleName:
    """The keyword that "auto" stands for."""
    suitable = {s.keyword for s in schedules_of(facts) if s.suits(facts, arch)}
    order = AUTOMATIC_BACKWARD if facts.wanted or facts.spec.kernel.storage != "dense" else AUTOMATIC
    return next((keyword for keyword in order if keyword in suitable), order[-1])


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
    if len(parts) < 2 or _request(spec, schedule, wanted).schedule != "auto":
        return (wanted,)
    of_all, of_first = (
        AUTOMATIC_BACKWARD.index(automatic(facts_of(replace(spec, kernel=_request(spec, schedule, w)), w, deterministic), arch))
        for w in (wanted, parts[0])
    )
    if of_first == of_all and shapes:
        is_one = _fit_pairs(choose(spec, arch, schedule, wanted=wanted, deterministic=deterministic), shapes)
        return (wanted,) if is_one else tuple(parts)
    return tuple(parts) if of_first < of_all else (wanted,)


def _fit_pairs(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the captured tensors whose gradients are dS have one element for each pair of a call, by its arrays' shapes."""
    assert plan.facts.gradient is not None
    sizes = dict(zip(("batch", "q_heads", "q_len"), shapes["q"], strict=False))
    sizes |= dict(zip(("batch", "kv_heads", "kv_len"), shapes["k"], strict=False))
    expected = {n: tuple(sizes.get(s) for s in sizes_of_pairs(plan.facts.gradient.of(n))) for n in plan.written_pairs}
    return all(tuple(shapes[name]) == wanted for name, wanted in expected.items())


def default_arch(schedule: str | None) -> str:
    """The architecture to plan for if none is named: that of the most GPUs, or the one that the keyword needs."""
    return "sm_90a" if schedule in HOPPER_SCHEDULES else DEFAULT_ARCH


def schedules_for(spec: AttentionSpec, arch: Arch, wanted: tuple[str, ...] = ()) -> tuple[ScheduleName, ...]:
    """The keywords of all schedules that suit the spec on `arch`: of forwards, or of backwards with the gradients `wanted`."""
    facts = facts_of(spec, wanted)
    return tuple(dict.fromkeys(s.keyword for s in schedules_of(facts) if s.suits(facts, arch)))


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The choice for a spec on an architecture: one plan for all lengths, or one of several by the lengths of a call."""

    usual: Plan  # if the lengths are unknown
    by_lengths: TileChoice | None  # None: one tile of `usual`'s schedule is for all lengths
    has_few_rows: bool = False  # few rows and many keys have a schedule of their own
    short_rows: tuple[ShortRows, ...] = ()  # those that have tiles of their own

    @property
    def depends_on_lengths(self) -> bool:
        return self.by_lengths is not None or self.has_few_rows or bool(self.short_rows)

    def at(self, problem: Problem, saves_lse: bool = False) -> Plan:
        """The plan for these lengths; with `saves_lse`, one whose schedule has a backward. Lengths that were not seen before
        cost a comparison of a few tiles, whose plans are made once."""
        if not saves_lse and self._has_few_rows(problem):
            return _few_rows(self)
        if short := short_rows.of_problem(self.short_rows, problem):
            return _short_rows(self, short)
        return self.usual if self.by_lengths is None else _at(self, problem)

    def has_own(self, problem: Problem) -> bool:
        """Whether these lengths have a plan of their own, not a tile of `usual`'s schedule."""
        return self._has_few_rows(problem) or short_rows.of_problem(self.short_rows, problem) is not None

    def _has_few_rows(self, problem: Problem) -> bool:
        return self.has_few_rows and decode.is_for(problem)

    def plans(self) -> tuple[Plan, ...]:
        """Every plan that `at` may return, `usual` first."""
        others = (_of_tile(self.usual, tile) for tile in (self.by_lengths.tiles if self.by_lengths else ()))
        usual = self.usual
        few = (_few_rows(self),) if self.has_few_rows else ()
        short = (_short_rows(self, one) for one in self.short_rows)
        return usual, *(p for p in others if (p.block_q, p.block_kv) != (usual.block_q, usual.block_kv)), *few, *short


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
    `kernel` statement (`attngen.spec.attention.KernelRequest.overridden`), and a KernelRequest replaces it; "auto" is
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
    spec, decisions = plan.facts.spec, plan.decisions
    if not spec.lse:
        because = "of the sums that divide O, in which weights may be rounded: the backward rounds them too"
        plan, decisions = replace(plan, saves_lse=True), (*decisions, Decision("lse", "saved", because))
    if plan.schedule.is_fused and needs_lse_rest(spec):
        plan, decisions = replace(plan, saves_lse_rest=True), (*decisions, Decision("lse_rest", "saved", WHY_LSE_REST))
    return replace(plan, decisions=decisions)


def _gradients(spec: AttentionSpec, direction: Direction | None, wanted: Iterable[str] | None) -> tuple[str, ...]:
    """The gradients that a plan computes; none for a forward. Raises GradientError."""
    if (direction or ("backward" if wanted else "forward")) == "forward":
        return ()
    check_backward_names(spec)
    return wanted_gradients(spec, wanted)


@remembered
def choice_of(
    spec: AttentionSpec,
    arch: Arch,
    schedule: str | KernelRequest | None = None,
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Choice:
    """The part of `choose` that does not depend on lengths. Raises PlanRefusal."""
    kernel = _request(spec, schedule, wanted)
    facts = facts_of(replace(spec, kernel=kernel), wanted, deterministic)
    chosen = schedule_of(facts, arch, automatic(facts, arch) if kernel.schedule == "auto" else kernel.schedule)
    if (wanted or kernel.storage != "dense") and (reason := chosen.reason_against(facts, arch)):
        others = ", ".join(dict.fromkeys(s.keyword for s in schedules_of(facts) if s.suits(facts, arch)))
        schedule_is = f"the {'backward of the ' if wanted else ''}{chosen.keyword} schedule"
        what = f"{schedule_is} does not suit attention `{spec.name}` on {arch.name}"
        cure = "compute these gradients by" if wanted else "use"
        raise refusal("kernel", what, reason, f"{cure} auto, or one of: {others}" if others else "use dense storage")
    usual = chosen.plan(facts, arch)
    if kernel.q not in (None, usual.q_place):
        what = f"q {kernel.q} does not fit this {chosen.keyword} kernel"
        raise refusal("kernel", what, f"q is {usual.q_place or 'no choice of this schedule'}", "leave `q` to the planner")
    if kernel.is_paged and kernel.schedule == "auto" and chosen is not HOPPER and arch.has(*NEEDED):
        because = HOPPER.why_not(facts, arch)
        usual = replace(usual, decisions=(*usual.decisions, Decision("by auto", f"{chosen.keyword}, not hopper", because)))
    first, *rest = parts_of(spec, arch, schedule, wanted, deterministic)
    if rest:
        because = (
            f"calls compute those of {', '.join(first)} by themselves, which takes less time than this one program for all"
        )
        usual = replace(usual, decisions=(Decision("by auto", "gradients in two programs", because), *usual.decisions))
    leaves_open = kernel == kernel.bare("auto")  # what the lengths of a call may decide
    has_few_rows = leaves_open and not wanted and DECODE.suits(facts, arch)
    if has_few_rows:
        usual = replace(usual, decisions=(*usual.decisions, Decision(*decode.FOR_AUTO)))
    takes_short_rows = leaves_open and kernel.is_planned and FUSED in schedules_for(facts.spec, arch, wanted)
    return Choice(usual, chosen.by_lengths(facts), has_few_rows, short_rows.short_rows(facts) if takes_short_rows else ())


@remembered
def _few_rows(choice: Choice) -> Plan:
    return DECODE.plan(choice.usual.facts, choice.usual.arch)


@remembered
def _short_rows(choice: Choice, short: ShortRows) -> Plan:
    """By fused, with the tiles of `short` if they are smaller than its own and fit."""
    usual = choice.usual
    facts, arch = usual.facts, usual.arch
    said = {"direction": usual.direction, "wanted": usual.wanted, "deterministic": facts.deterministic}
    tile = short.backward if facts.wanted else short.forward
    plan = choose(facts.spec, arch, FUSED, **said)  # type: ignore[arg-type]
    if tile is not None and tile.block_q * tile.block_kv < plan.block_q * plan.block_kv:
        with suppress(PlanRefusal):
            plan = choose(facts.spec, arch, _stated(facts.spec, FUSED, tile, None), **said)  # type: ignore[arg-type]
    if (plan.keyword, plan.tile) == (usual.keyword, usual.tile):
        return usual
    decisions = (replace(d, because=d.because.replace(STATED, "for short rows")) for d in plan.decisions)
    return replace(plan, decisions=(Decision("by auto", f"{FUSED}, for short rows", short_rows.BECAUSE), *decisions))


def _request(spec: AttentionSpec, schedule: str | KernelRequest | None, wanted: tuple[str, ...]) -> KernelRequest:
    """The `kernel` statement to plan for."""
    if isinstance(schedule, KernelRequest):
        return replace(schedule, storage=spec.kernel.storage, page_size=spec.kernel.page_size)
    kernel = spec.kernel.overridden(schedule)
    return kernel.bare() if wanted else kernel


@lru_cache(maxsize=4096)
def _at(choice: Choice, problem: Problem) -> Plan:
    assert choice.by_lengths is not None
    return _of_tile(choice.usual, choice.by_lengths.fastest(problem))


@remembered
def _of_tile(usual: Plan, tile: Tile) -> Plan:
    schedule = usual.schedule
    assert schedule.propose_tile is not None
    return schedule.propose_tile(schedule, usual.facts, usual.arch, tile)


def tuned_plan(plan: Plan, kernel: KernelRequest, decision: Decision) -> Plan:
    """`plan` with the tile, stages and warps of `kernel`, which tuning found, and `decision` first.

    `plan` itself if they do not fit: another version of attngen found them.
    """
    saves = plan.saves_lse or plan.saves_lse_rest
    said = {"direction": plan.direction, "wanted": plan.wanted, "deterministic": plan.facts.deterministic}
    try:
        found = choose(plan.facts.spec, plan.arch, kernel, None, saves, **said)  # type: ignore[arg-type]
    except PlanRefusal:
        return plan
    others = (replace(d, because=d.because.replace(STATED, "as tuned")) for d in found.decisions)
    return replace(found, decisions=(decision, *others))


def plans_for(spec: AttentionSpec, arch: Arch, schedule: str | None = None) -> tuple[Plan, ...]:
    """Every plan of a forward that `choose` may return for `spec`, whatever the lengths of a call."""
    return choice_of(spec, arch, schedule).plans()
