"""The problems on which a kernel is checked: chosen so that each part of the spec and each class of tile makes a difference.

Lengths follow from the plan's tiles, params and captured tensors from a short search. What no problem within the budget reaches
is said (`Chosen.missed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attngen.diagnostics import ArgumentError
from attngen.inspect.circumstances import (
    JOINS,
    RISES,
    UNEQUAL,
    Case,
    Goal,
    circumstances,
    joins,
    rescales,
    rises,
    seconds,
    wanted_circumstances,
    wrong_pairs,
)
from attngen.inspect.prepare import check_call
from attngen.plan import Plan
from attngen.plan.split_keys import PackedTiles
from attngen.reference.alternatives import MAX_ALTERNATIVES, Alternative, alternatives
from attngen.reference.compare import Truth, truth
from attngen.reference.compare_gradients import GradientTruth, gradient_truth
from attngen.reference.coverage import Exercise
from attngen.reference.definition import allowed_rows
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.numpy_oracle import numbers_of
from attngen.reference.problems import USUAL, Draw, Sample, Shape, sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const, Type, walk

BUDGET, LIMIT = 3.0, 10.0  # seconds of the emulated device: of a problem that is preferred, and of any
EDGE_BUDGET = 1.0  # of a problem for the edges of tiles alone
NAIVE_TILE = 128  # rows or keys of a block of the naive kernels
BEYOND = 17  # rows or keys past a constant of the mask or score
REMEMBERED = 8  # problems
RISING = 8.0  # times Q: maxima then differ from tile to tile
SPLITS = 4  # of a row's keys
LONGEST = 4096  # of a constant in a mask or score, to be reached by the lengths


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the problems of a check are held to; None is chosen."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    q_len: int | None = None
    kv_len: int | None = None
    params: Mapping[str, int | float] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One problem. If its arrays are `apart`, each has strides of its own: gaps lie between the rows (`stored.apart`). If
    `multiprocessors` is not 0, the emulated device has as many, by which keys are split over blocks."""

    shape: Shape
    params: Mapping[str, int | float]
    seed: int = 0
    draw: Draw = USUAL
    apart: bool = field(default=False, compare=False)
    multiprocessors: int = field(default=0, compare=False)

    def problem(self, spec: AttentionSpec) -> Sample:
        return sample(spec, self.shape, self.seed, self.draw)

    def describe(self, spec: AttentionSpec) -> str:
        """Sizes and params in words, as `2 x 4 heads over 2, 129 rows, 33 keys, size 43`."""
        sizes = self.shape.sizes(spec)
        heads = f"{sizes['batch']} x {sizes['q_heads']} heads over {sizes['kv_heads']}"
        parts = [heads, f"{sizes['q_len']} rows", f"{sizes['kv_len']} keys"]
        parts += [f"{name} {sizes[name]}" for name in spec.free_dims]
        parts += [f"{p.name} {self.params[p.name]}" for p in spec.params if p.name in self.params]
        parts += ["strides of its own for each array"] if self.apart else []
        parts += [f"keys split for {self.multiprocessors} multiprocessors"] if self.multiprocessors else []
        return ", ".join(parts) + (f", Q times {self.draw.magnitude:g}" if self.draw.magnitude != 1 else "")


class Known:
    """One problem, and what is computed of it when it is needed."""

    def __init__(self, spec: AttentionSpec, trial: Trial) -> None:
        self.spec, self.trial, self.sample = spec, trial, trial.problem(spec)
        self._gradients: dict[tuple[tuple[str, ...], tuple[str, ...]], GradientTruth] = {}

    @cached_property
    def exercise(self) -> Exercise:
        return Exercise(self.spec, self.sample, self.trial.params)

    @cached_property
    def truth(self) -> Truth:
        return truth(self.spec, self.sample, self.trial.params)

    @property
    def loss(self) -> Loss:
        return sample_loss(self.spec, self.sample, self.trial.seed)

    def gradients(self, plan: Plan) -> GradientTruth:
        """The gradients that `plan` computes, and their bounds."""
        key = (plan.wanted, plan.saved)
        if key not in self._gradients:
            params = self.trial.params
            self._gradients[key] = gradient_truth(self.spec, self.sample, self.loss, plan.wanted, params, plan.saved)
        return self._gradients[key]

    def compute(self, plan: Plan) -> None:
        """Computes what the results of `plan` are compared with."""
        if plan.wanted:
            self.gradients(plan)
        else:
            _ = self.truth


class Problems:
    """The latest problems of a spec, with their results: the schedules of a check share some, and a search asks again."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._latest: list[Known] = []

    def known(self, trial: Trial) -> Known:
        one = next((known for known in self._latest if known.trial == trial), None)
        if one is None:
            one = Known(self.spec, trial)
            self._latest = [one, *self._latest[: REMEMBERED - 1]]
        return one


@dataclass(frozen=True, slots=True)
class Chosen:
    """The problems for one kernel, and what none of them exercises."""

    trials: tuple[Trial, ...]
    missed: tuple[str, ...]


def choose_trials(spec: AttentionSpec, plan: Plan, fixed: Fixed, problems: Problems | None = None) -> Chosen:
    """The problems for `plan`: one of several tiles, one with batches, groups of heads and few keys, one with large scores if
    the kernel rescales, one whose keys are split over blocks if it splits them, and longer ones for what these do not
    exercise. All but the first are `apart`. If `fixed` has lengths, one problem of these.

    Raises ArgumentError and ObligationError if no problem is possible.
    """
    search = _Search(spec, plan, fixed, problems or Problems(spec))
    for shapes in search.families():
        search.take(shapes)
    search.take_edges()
    search.take_rises()
    search.take_joins()
    return search.chosen()


def _by_values(goal: Goal, shape: Shape) -> bool:
    """Whether other params or captured tensors may exercise `goal` in a problem of that shape."""
    if isinstance(goal, Alternative):
        return not (goal.part == "b" and shape.batch == 1)
    return goal.by_values


class _Search:
    def __init__(self, spec: AttentionSpec, plan: Plan, fixed: Fixed, problems: Problems) -> None:
        self.spec, self.plan, self.fixed, self.problems = spec, plan, fixed, problems
        naive = not plan.schedule.is_tiled
        self.tile = (NAIVE_TILE, NAIVE_TILE) if naive else (plan.block_q, plan.block_kv)
        self.params: dict[str, int | float] = {p.name: p.default for p in spec.params if p.default is not None}
        self.params |= fixed.params
        changes = alternatives(spec, MAX_ALTERNATIVES + 1)
        beyond = f"parts of the mask and score after the first {MAX_ALTERNATIVES}: they are not tried"
        self.untried = (beyond,) if len(changes) > MAX_ALTERNATIVES else ()
        self.left: dict[Goal, None] = dict.fromkeys(changes[:MAX_ALTERNATIVES])
        self.left |= dict.fromkeys(wanted_circumstances(spec, plan))
        self.trials: list[Trial] = []
        self.refusal: Exception | None = None

    # --- shapes

    def families(self) -> Iterator[list[Shape]]:
        """Lists of shapes, of each of which the first that is possible and cheap is tried; later ones if something is left."""
        if self.fixed.q_len is not None or self.fixed.kv_len is not None:
            q_len, kv_len = self.fixed.q_len, self.fixed.kv_len
            given = [n for n in (q_len, kv_len) if n is not None]
            yield [self._shape(1, given[0] if q_len is None else q_len, given[0] if kv_len is None else kv_len)]
            return
        rows, keys = self.tile
        short = -(-max(rows, keys) // keys) * keys + 1
        if self.plan.schedule.is_tiled:
            long = -(-max(rows, max(2, self.plan.stages) * keys) // keys) * keys + 1
            few = keys - 1  # a full range one longer would take the key past them
            lengths = [(long, long + keys), (long, long), (short, short + 2), (short, short)]
        else:
            few = keys // 4 + 1
            lengths = [(short, short + 2), (keys // 2 + 1, short)]
        yield [self._shape(1, *n) for n in lengths]
        yield [self._shape(1, *n) for n in lengths]
        yield [self._shape(2, *n) for n in ((rows + 1, few), (few - 2, few), (few, few))]
        for c in self._constants():
            beyond = c + BEYOND
            for q_len, kv_len in ((beyond, few), (few, beyond), (beyond, beyond)):
                yield [self._shape(1, q_len, kv_len)]
        yield from ([shape] for shape in self._long())

    def _long(self) -> list[Shape]:
        """Shapes of several blocks of rows, of tiles of keys, and of both."""
        rows, keys = self.tile
        length = 4 * max(rows, keys) + 1
        return [self._shape(1, *lengths) for lengths in ((rows, length), (length, keys), (length, length))]

    def _shape(self, batch: int, q_len: int, kv_len: int) -> Shape:
        """Groups of two heads; of one head of K and V, and with several batches of two."""
        fixed = self.fixed
        heads = fixed.heads or fixed.kv_heads or 2 * batch
        kv_heads = fixed.kv_heads or (heads // 2 if heads % 2 == 0 and fixed.heads is None else heads)
        batch = batch if fixed.batch is None else fixed.batch
        return Shape(batch, heads, kv_heads, q_len, kv_len, dict(fixed.free))

    def _constants(self) -> list[int]:
        """Integers of the mask and score that the lengths tried so far may not reach."""
        exprs = [e for e in (self.spec.mask, self.spec.score) if e is not None]
        reached = min(max(t.shape.q_len for t in self.trials), max(t.shape.kv_len for t in self.trials)) if self.trials else 0
        found = {abs(int(n.value)) for n in walk(*exprs) if isinstance(n, Const) and n.type is Type.INT}
        return [c for c in sorted(found) if reached - BEYOND < c <= LONGEST]

    # --- the search

    def take(self, shapes: list[Shape]) -> None:
        """Adds a problem of the first shape that is possible within the budget, if it exercises something new."""
        if not self.left and self.trials:
            return
        first: Trial | None = None
        for shape in shapes:
            trial = self._possible(shape)
            if trial is None:
                continue
            first = trial
            if self._seconds(trial) <= BUDGET:
                break
        if first is None or (self.trials and self._seconds(first) > LIMIT):
            return
        trial, hit = self._varied(first)
        if hit or not self.trials:
            self.trials.append(trial)
            for goal in hit:
                del self.left[goal]

    def take_edges(self) -> None:
        """Adds cheap problems with other params or captured tensors, on which more changes of the plan's bounds are wrong."""
        if not self.plan.schedule.is_tiled or not self.trials or self.fixed.q_len is not None or self.fixed.kv_len is not None:
            return
        first = self.trials[0]
        others = [*self._by_params(first), *self._by_integers(first)]
        seen: set[str] = set()
        for taken in self.trials if others else ():
            seen |= self._wrong_bounds(taken, seen)
        for one in others:
            trial = self._possible_with(one)
            if trial is None or self._seconds(trial) > EDGE_BUDGET:
                continue
            if found := self._wrong_bounds(trial, seen):
                self.trials.append(trial)
                seen |= found

    def take_rises(self) -> None:
        """Adds a small problem with large scores for RISES, if a kernel rescales and no problem makes it."""
        if not rescales(self.plan) or any(rises(self._case(trial)) for trial in self.trials):
            return
        keys = self.tile[1]
        for usual in self._small([keys * tiles for tiles in (2, 4, 8, 16)]):
            if self._added(replace(usual, draw=replace(usual.draw, magnitude=RISING, integers="two documents")), rises):
                return
        self.untried = (*self.untried, str(RISES))

    def take_joins(self) -> None:
        """Adds a small problem for JOINS, on more multiprocessors than the emulated device has, if a plan splits keys."""
        if not self.plan.schedule.packs_heads:
            return
        splits = self.plan.own.splits
        for usual in self._small([2 * splits.keys, 4 * splits.keys]):
            sizes = usual.shape.sizes(self.spec)
            tiles = sizes["batch"] * sizes["kv_heads"] * PackedTiles(splits.rows)(sizes)
            if self._added(replace(usual, multiprocessors=SPLITS * tiles), joins):
                return
        self.untried = (*self.untried, str(JOINS))

    def _small(self, lengths: Sequence[int]) -> Iterator[Trial]:
        """Problems with few heads of these numbers of keys and one more, the smallest first, if the lengths are not fixed."""
        if self.fixed.q_len is None and self.fixed.kv_len is None:
            heads = self.fixed.heads or self.fixed.kv_heads or 1
            kv_heads = self.fixed.kv_heads or heads
            for n in lengths:
                for q_len in (self.tile[1] // 4, n, n + 1):
                    shape = replace(self._shape(1, q_len, n + 1), q_heads=heads, kv_heads=kv_heads)
                    if (trial := self._possible(shape)) is not None:
                        yield trial

    def _added(self, trial: Trial, occurs: Callable[[Case], bool]) -> bool:
        """Adds a cheap problem in which something occurs. Returns whether it was added."""
        if self._seconds(trial) > LIMIT or not occurs(self._case(trial)):
            return False
        self.trials.append(trial)
        return True

    def _case(self, trial: Trial) -> Case:
        sizes, problem = trial.shape.sizes(self.spec), self.problems.known(trial).sample
        return Case(self.spec, self.plan, self.tile, sizes, trial.params, problem, trial.multiprocessors)

    def _wrong_bounds(self, trial: Trial, seen: set[str]) -> set[str]:
        """The changes of the plan's bounds, other than those in `seen`, with which the problem has a result that a check
        reports."""
        case = self._case(trial)
        sizes, numbers = case.sizes, numbers_of(self.spec, case.problem, trial.params, np.float32)
        every = np.ones((sizes["q_len"], sizes["kv_len"]), bool)
        allowed = {
            (b, h): every & allowed_rows(numbers, b, h, slice(0, sizes["q_len"])) if self.spec.mask is not None else every
            for b, h in {(0, 0), (sizes["batch"] - 1, sizes["q_heads"] - 1)}
        }
        found: set[str] = set()
        for what, head, computed in wrong_pairs(case, allowed):
            if what not in seen | found and self.problems.known(trial).exercise.notices_pairs(*head, allowed[head], computed):
                found.add(what)
        return found

    def _seconds(self, trial: Trial) -> float:
        return seconds(self._case(trial))

    def _possible(self, shape: Shape) -> Trial | None:
        """A problem of that shape; None if every call of it is refused."""
        for params in (self.params, *self._other_params(shape)):
            try:
                sized = with_free_sizes(self.spec, shape, params)
                check_call(self.spec, sized, params)
            except ArgumentError as error:  # and ObligationError
                self.refusal = self.refusal or error
                continue
            return Trial(sized, params, self.fixed.seed, Draw(tile=self.tile))
        return None

    def _varied(self, trial: Trial) -> tuple[Trial, set[Goal]]:
        """`trial` with the params, values of captured tensors and magnitude that exercise most of what is left."""
        best, hit = trial, self._hits(trial, {*self.left})
        for variants in (self._by_params, self._by_integers, self._by_magnitude, self._by_seed):
            for one in variants(best):
                missing = {goal for goal in self.left if goal not in hit and _by_values(goal, best.shape)}
                if not missing:
                    return best, hit
                possible = self._possible_with(one)
                if possible is None or not self._hits(possible, missing):
                    continue
                found = self._hits(possible, {*self.left})
                if len(found) > len(hit):
                    best, hit = possible, found
        return best, hit

    def _possible_with(self, trial: Trial) -> Trial | None:
        """`trial` with free sizes for its params, if its call is not refused and within the limit."""
        shape = with_free_sizes(self.spec, replace(trial.shape, free=dict(self.fixed.free)), trial.params)
        one = replace(trial, shape=shape)
        return one if self._is_call(one) and self._seconds(one) <= LIMIT else None

    def _is_call(self, trial: Trial) -> bool:
        try:
            check_call(self.spec, trial.shape, trial.params)
        except ArgumentError:  # and ObligationError
            return False
        return True

    def _by_params(self, trial: Trial) -> Iterator[Trial]:
        for params in self._other_params(trial.shape):
            yield replace(trial, params=params)

    def _other_params(self, shape: Shape) -> Iterator[dict[str, int | float]]:
        """Values near parts of the lengths for integers, fractions and multiples of the default for floats."""
        open_params = [p for p in self.spec.params if p.name not in self.fixed.params and p.default is not None]
        length, (_, keys) = max(shape.q_len, shape.kv_len), self.tile
        integers = (length // 3, keys + 2, keys, max(length - 1, 1), 3, 1)
        factors = (0.5, 0.125, 8.0)
        for i in range(len(integers) if open_params else 0):
            chosen: dict[str, int | float] = {}
            for position, p in enumerate(open_params):
                assert p.default is not None
                if p.type is Type.INT:
                    chosen[p.name] = integers[(i + position) % len(integers)]
                else:
                    chosen[p.name] = (p.default or 1.0) * factors[(i + position) % len(factors)]
            yield {**self.params, **chosen}

    def _by_integers(self, trial: Trial) -> Iterator[Trial]:
        if any(i.dtype.kind == "int" for i in self.spec.inputs):
            for step in range(4):
                for integers in ("two documents", "positions"):
                    yield replace(trial, seed=self.fixed.seed + step, draw=replace(trial.draw, integers=integers))

    def _by_magnitude(self, trial: Trial) -> Iterator[Trial]:
        if any(isinstance(goal, Alternative) and goal.keyword != "mask" for goal in self.left):
            for magnitude in (8.0, 64.0):
                yield replace(trial, draw=replace(trial.draw, magnitude=magnitude))

    def _by_seed(self, trial: Trial) -> Iterator[Trial]:
        if self.spec.inputs:
            for step in range(1, 5):
                yield replace(trial, seed=self.fixed.seed + step)

    def _hits(self, trial: Trial, goals: set[Goal]) -> set[Goal]:
        """Those of `goals` that the problem exercises."""
        found: set[Goal] = goals & {*circumstances(self._case(trial))}
        changes = [goal for goal in self.left if goal in goals and isinstance(goal, Alternative)]
        if changes:
            exercise = self.problems.known(trial).exercise
            found |= {*exercise.noticed(changes)}
            for one in changes:
                if one not in found and exercise.same_by_normalization(one):
                    self.left.pop(one, None)
        return found & {*self.left}

    def _is_possible(self, goal: Goal) -> bool:
        """Whether longer problems, or other values, would exercise `goal`: not if the plan has no such tile."""
        if isinstance(goal, Alternative) or (goal is not UNEQUAL and not goal.by_values):
            return True
        if goal is UNEQUAL:
            return any(self._possible(self._shape(1, *lengths)) is not None for lengths in ((5, 9), (9, 5)))
        possible = [trial for trial in map(self._possible, self._long()) if trial is not None]
        every = [one for trial in possible for one in (trial, *self._by_params(trial), *self._by_integers(trial))]
        return any(self._hits(one, {goal}) for one in every if self._is_call(one))

    def chosen(self) -> Chosen:
        if not self.trials:
            assert self.refusal is not None
            raise self.refusal
        missed = [str(goal) for goal in (*self.left,) if self._is_possible(goal)]
        first, *others = self.trials
        return Chosen((first, *(replace(one, apart=True) for one in others)), (*missed, *self.untried))
