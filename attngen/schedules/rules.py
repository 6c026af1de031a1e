"""What depends on the lengths of a call: an ordered table of rules. The first that serves a call selects its plan; calls that
none serves, and those of unknown lengths, have the usual one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from attngen.plan.facts import SpecFacts, facts_of
from attngen.plan.formulas import larger
from attngen.plan.plan import Decision, Plan, PlanRefusal, Schedule, stated_by
from attngen.plan.problem import Problem
from attngen.plan.tile import Tile
from attngen.schedules.decode import DECODE, DECODE_WGMMA, wgmma_plan
from attngen.schedules.decode import plan as decode
from attngen.schedules.one_plan import plan_of, stated
from attngen.schedules.registry import FUSED, keywords_of
from attngen.spec.attention import KernelRequest

P = TypeVar("P")
Cases: TypeAlias = Callable[
    [Problem], tuple[tuple[bool, P], ...]
]  # conditions and points; of numbers, or of `attngen.plan.formulas`


def first_of(cases: Cases[P]) -> Callable[[Problem], P | None]:
    """The point of the first condition that holds; None if there is none."""
    return lambda problem: next((point for holds, point in cases(problem) if holds), None)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule of the table, as it applies to one spec on one architecture."""

    points: tuple[object, ...]  # what it selects from
    when: Callable[[Problem], object]  # the point for the lengths of a call; None: it does not serve them
    plan: Callable[[Plan, Any], Plan]  # the plan of a point, from the usual one
    note: Decision | None = None  # what the usual plan says of it
    has_backward: bool = True  # a backward can read what its forwards save
    is_special: bool = True  # its plans are not those of other tiles of the usual schedule
    cases: Cases[object] | None = None  # `when` as formulas, of rules that are printed as C++


def rules_of(usual: Plan) -> tuple[Rule, ...]:
    """The rules that apply to the spec of `usual`, in order."""
    return tuple(rule for make in (few_rows, short_rows, fastest_tile) if (rule := make(usual)) is not None)


def _leaves_open(facts: SpecFacts) -> bool:
    """Whether the lengths of a call may decide the schedule."""
    return facts.spec.kernel == facts.spec.kernel.bare("auto")


def few_rows(usual: Plan) -> Rule | None:
    """Few rows and many keys: decode splits keys over blocks."""
    facts, arch = usual.facts, usual.arch
    if facts.wanted or not _leaves_open(facts) or not DECODE.suits(facts, arch):
        return None

    by_mma = [(DECODE, rows) for rows in decode.row_counts(facts, arch)]
    points = by_mma if wgmma_plan.cannot(facts, arch) else [(DECODE_WGMMA, wgmma_plan.LEAST_ROWS), *by_mma]

    def cases(problem: Problem) -> tuple[tuple[bool, tuple[Schedule, int]], ...]:
        # packed sequences have the longest's number of rows: with batch_invariant it must not matter
        packed = problem.group * (1 if facts.spec.kernel.batch_invariant else problem.rows)
        *most, least = points
        few = decode.is_for(problem)
        return (*((few & (point[1] <= packed), point) for point in most), (few, least))

    def plan(_: Plan, point: tuple[Schedule, int]) -> Plan:
        schedule, rows = point
        return schedule.plan(facts, arch) if schedule is DECODE_WGMMA else decode.of_rows(schedule, facts, arch, rows)

    return Rule(tuple(points), first_of(cases), plan, Decision(*decode.FOR_AUTO), has_backward=False, cases=cases)


WHY_SHORT = "their tiles are small, and an SM computes several of them side by side"
WHY_SHORT_FP32 = "splitting Q, K and V into terms takes longer than the tensor cores save"


@dataclass(frozen=True, slots=True)
class ShortRows:
    """The tiles for calls of at most so many rows, and as many keys; None: those of the schedule."""

    most: int
    forward: Tile | None = None
    backward: Tile | None = None  # rows that a block of keys visits x its keys
    fills: bool = True  # calls with a head for each SM at least, those of the whole batch counted
    because: str = WHY_SHORT


# Measured by `attngen tune` on an H200 (docs/experiments.md), by the larger head size, at most.
SHORT_ROWS = {
    32: (ShortRows(64, Tile(64, 64, 2, 2), Tile(64, 64, 2, 2)), ShortRows(128)),
    64: (ShortRows(64, Tile(64, 64, 2, 4), Tile(32, 64, 2, 2)),),
    128: (ShortRows(64, Tile(64, 32, 1, 4), Tile(32, 64, 2, 4)),),
}
# Measured by `benchmarks/hopper.py --only fp32`: at 128 rows fused is the faster one, at 256 with a mask too, at 512 never
SHORT_FP32, SHORT_MASKED_FP32 = (ShortRows(n, fills=False, because=WHY_SHORT_FP32) for n in (192, 384))


def short_rows(usual: Plan) -> Rule | None:
    """Many short rows, such as those of windows of an image: fused, with tiles of their size. A tile of 128 rows is half empty
    there, and the persistent kernels compute one work tile after the other, where an SM has room for several small blocks.
    It is measured where every sequence has a place of its own.
    """
    facts, spec = usual.facts, usual.facts.spec
    may = _leaves_open(facts) and spec.kernel.is_planned and FUSED in keywords_of(facts, usual.arch)
    points = _points_of_short_rows(usual) if may and spec.kernel.storage in ("dense", "packed") else ()

    def cases(problem: Problem) -> tuple[tuple[bool, ShortRows], ...]:
        fills, longest = problem.heads >= problem.multiprocessors, larger(problem.rows, problem.keys)
        return tuple((fills & (longest <= p.most) if p.fills else longest <= p.most, p) for p in points)

    return Rule(points, first_of(cases), _of_short_rows, cases=cases) if points else None


def _points_of_short_rows(usual: Plan) -> tuple[ShortRows, ...]:
    spec = usual.facts.spec
    if spec.dtype.bytes > 2:
        return () if usual.keyword == FUSED else (SHORT_FP32 if spec.mask is None else SHORT_MASKED_FP32,)
    return next((found for size, found in SHORT_ROWS.items() if max(spec.head_dim, spec.head_dim_v) <= size), ())


def _of_short_rows(usual: Plan, short: ShortRows) -> Plan:
    """By fused, with the tiles of `short` if they are smaller than its own and fit."""
    kernel = usual.facts.spec.kernel.bare(FUSED)
    tile = short.backward if usual.facts.wanted else short.forward
    plan = _with_kernel(usual, kernel)
    if tile is not None and tile.block_q * tile.block_kv < plan.block_q * plan.block_kv:
        with suppress(PlanRefusal):
            plan = _with_kernel(usual, stated(kernel, tile))
    if (plan.keyword, plan.tile) == (usual.keyword, usual.tile):
        return usual
    first = Decision("by auto", f"{FUSED}, for short rows", short.because)
    return replace(plan, decisions=(first, *stated_by(plan.decisions, "short rows")))


def _with_kernel(usual: Plan, kernel: KernelRequest) -> Plan:
    facts = usual.facts
    return plan_of(facts_of(replace(facts.spec, kernel=kernel), facts.wanted, facts.deterministic), usual.arch)


def fastest_tile(usual: Plan) -> Rule | None:
    """All other lengths: the tile of the usual schedule that a model of its time finds the fastest."""
    choice = usual.schedule.by_lengths(usual.schedule.as_read(usual.facts))
    if choice is None:
        return None
    others = ", ".join(f"{t.block_q} x {t.block_kv}" for t in choice.tiles if t != usual.tile)
    note = Decision("other tiles", others, "used instead for calls whose lengths make them faster") if others else None
    return Rule(choice.tiles, choice.fastest, _of_tile, note, is_special=False)


def _of_tile(usual: Plan, tile: Tile) -> Plan:
    return usual.schedule.plan_of_tile(usual.facts, usual.arch, tile)
