"""The problems on which a kernel is checked: chosen so that each part of the spec makes a difference, and that everything that
can happen to a block of the kernel happens.

Lengths follow from the plan's tiles, params and captured tensors from a short search. What no problem within the budget reaches
is said (`Chosen.missed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attngen.inspect.aimed import BEYOND, Aim, aims
from attngen.inspect.block_work import Case, seconds
from attngen.inspect.blocks import tile_of
from attngen.inspect.circumstances import BY_NAME, wanted_circumstances
from attngen.inspect.circumstances.row import Circumstance
from attngen.inspect.circumstances.sizes import UNEQUAL
from attngen.inspect.circumstances.tiles import CLASSES
from attngen.inspect.known import Known, Problems
from attngen.inspect.possible import LONGEST, Possible
from attngen.inspect.trial import Fixed, Trial
from attngen.inspect.wrong_bounds import wrong_pairs
from attngen.plan import Plan
from attngen.reference.alternatives import MAX_ALTERNATIVES, Alternative, alternatives
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const, Type, walk

BUDGET, LIMIT = 3.0, 10.0  # seconds of the emulated device: of a problem that is preferred, and of any
EDGE_BUDGET = 1.0  # seconds, for a problem that only exercises the edges of tiles
AIMED_LIMIT = 3.5  # seconds, for a problem that is aimed at a circumstance
MOST_VARIED = 20  # shapes, of which other params and captured tensors are tried for circumstances
FEW_KEYS = 9
OVERHEAD = 0.05  # seconds of any problem, for its reference and its launches
FIXED = "the lengths are fixed: with others, more can happen to a block, which is not checked"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The problems for one kernel."""

    trials: tuple[Trial, ...]
    missed: tuple[str, ...]  # what none of them exercises
    absent: tuple[str, ...] = ()  # circumstances that no problem that was tried has: the mask does not allow them


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
    search.take_aimed()
    return search.chosen()


# Those that problems of several tiles, heads and batches have; others have problems of their own
OF_PROBLEMS = {BY_NAME[name] for name in ("unequal_lengths", "batches", "heads", "groups", "ragged_rows", "ragged_keys")}
OF_PROBLEMS |= {*CLASSES}

Goal = Alternative | Circumstance


def _sentence(goal: Goal) -> str:
    return goal.sentence if isinstance(goal, Alternative) else f"no problem has {goal}"


def _by_values(goal: Goal, shape: Shape) -> bool:
    """Whether other params or captured tensors may exercise `goal` in a problem of that shape."""
    if isinstance(goal, Alternative):
        return not (goal.part == "b" and shape.batch == 1)
    return goal.by_values


class _Search:
    def __init__(self, spec: AttentionSpec, plan: Plan, fixed: Fixed, problems: Problems) -> None:
        self.spec, self.plan, self.fixed, self.problems = spec, plan, fixed, problems
        self.possible, self.tile = Possible(spec, plan, fixed), tile_of(plan)
        changes = alternatives(spec, MAX_ALTERNATIVES + 1)
        beyond = f"parts of the mask and score after the first {MAX_ALTERNATIVES} are not tried"
        self.untried = (beyond,) if len(changes) > MAX_ALTERNATIVES else ()
        self.left: dict[Goal, None] = dict.fromkeys(changes[:MAX_ALTERNATIVES])
        wanted = [*wanted_circumstances(plan)]
        self.left |= dict.fromkeys(one for one in wanted if one in OF_PROBLEMS)
        self.aimed = dict.fromkeys(one for one in wanted if one not in OF_PROBLEMS)
        self.dear: dict[Circumstance, Trial] = {}  # by circumstance, the cheapest problem, which takes too long
        # By problem, which it keeps: keys are problems' identities
        self._cases: dict[tuple[object, ...], tuple[Known, Case]] = {}
        self.trials: list[Trial] = []

    # --- shapes

    def families(self) -> Iterator[list[Shape]]:
        """Lists of shapes, of each of which the first that is possible and cheap is tried; later ones if something is left."""
        if self.fixed.has_lengths:
            q_len, kv_len = self.fixed.q_len, self.fixed.kv_len
            given = [n for n in (q_len, kv_len) if n is not None]
            yield [self.possible.shape(1, given[0] if q_len is None else q_len, given[0] if kv_len is None else kv_len)]
            return
        rows, keys = self.tile
        short = -(-max(rows, keys) // keys) * keys + 1
        if self.plan.schedule.is_tiled:
            few = keys - 1  # a full range one longer would take the key past them
            lengths = [(short, max(short, 2 * keys + 1) + keys), (short, short), (short, short + 2)]
        else:
            few = FEW_KEYS
            lengths = [(2 * few, short + 2), (short, 2 * few), (short, short + 2)]
        yield [self.possible.shape(1, *n) for n in lengths]
        yield [self.possible.shape(1, *n) for n in lengths]
        yield [self.possible.shape(2, *n) for n in ((rows + 1, few), (few - 2, few), (few, few))]
        for c in self._constants():
            beyond = c + BEYOND
            for q_len, kv_len in ((beyond, few), (few, beyond), (beyond, beyond)):
                yield [self.possible.shape(1, q_len, kv_len)]
        yield from ([shape] for shape in self._long())

    def _long(self) -> list[Shape]:
        """Shapes of several blocks of rows, of tiles of keys, and of both."""
        rows, keys = self.tile
        length = 4 * max(rows, keys) + 1
        return [self.possible.shape(1, *lengths) for lengths in ((rows, length), (length, keys), (length, length))]

    def _constants(self) -> list[int]:
        """Integers of the mask and score that the lengths tried so far may not reach."""
        exprs = [e for e in (self.spec.mask, self.spec.score, self.spec.v_scale) if e is not None]
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
            trial = self.possible.of_shape(shape)
            if trial is None:
                continue
            first = trial
            if self._seconds(trial) <= BUDGET:
                break
        if first is None or (self.trials and self._seconds(first) > LIMIT):
            return
        trial, hit = self._varied(first)
        if hit or not self.trials:
            self._add(trial)
            for goal in hit:
                del self.left[goal]

    def take_edges(self) -> None:
        """Adds cheap problems with other params or captured tensors, on which more changes of the plan's bounds are wrong."""
        if not self.plan.schedule.is_tiled or not self.trials or self.fixed.has_lengths:
            return
        others = [*self.possible.at_edges(self.trials[0])]
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

    def take_aimed(self) -> None:
        """Adds small problems, each for circumstances that no problem has yet."""
        if self.fixed.has_lengths:
            return
        every = [*aims(self.spec, self.plan, self.tile, self._constants())]
        usual = [(aim, trial) for aim in every if (trial := self._aimed_at(aim)) is not None]
        self._cover([trial for aim, trial in usual if not aim.steep])
        for trial in (trial for aim, trial in usual if aim.steep):
            self._take_steep(trial)
        for trial in [trial for aim, trial in usual if aim.varied][:MOST_VARIED]:
            self._take_varied(trial)

    def _cover(self, trials: Sequence[Trial]) -> None:
        """Adds those problems, one after another, in which most occurs for their time."""
        occurring = [(trial, goals) for trial in trials if (goals := dict.fromkeys(self._occurring(trial)))]
        found = [(trial, goals, self._seconds(trial)) for trial, goals in occurring]
        for trial, goals, time in found:
            if time > AIMED_LIMIT:
                for one in goals:
                    self.dear.setdefault(one, trial)
        cheap = [one for one in found if one[2] <= AIMED_LIMIT]
        while cheap:
            best, goals, _ = max(cheap, key=lambda one: len(one[1].keys() & self.aimed.keys()) / (one[2] + OVERHEAD))
            if not goals.keys() & self.aimed.keys():
                return
            self._add(best)

    def _aimed_at(self, aim: Aim) -> Trial | None:
        """The problem of an aim with the usual params and values; None if its call is refused."""
        fixed, shape = self.fixed, aim.shape
        batch = shape.batch if fixed.batch is None else fixed.batch
        if aim.setting.lengths and batch != shape.batch:
            return None
        kv_heads = fixed.kv_heads or fixed.heads or shape.kv_heads
        heads = fixed.heads or kv_heads * (shape.q_heads // shape.kv_heads)
        usual = self.possible.of_shape(Shape(batch, heads, kv_heads, shape.q_len, shape.kv_len, dict(fixed.free)))
        if usual is None:
            return None
        draw = replace(aim.setting.draw, tile=usual.setting.draw.tile)
        return replace(usual, setting=aim.setting).having(draw=draw, sections=aim.setting.sections or usual.setting.sections)

    def _take_steep(self, usual: Trial) -> None:
        for scores, trial in self.possible.steep(usual):
            wanted = [goal for goal in self.aimed if goal.scores == scores]
            if wanted and any(goal.occurs(self._case(trial)) for goal in wanted):
                self._cover([trial])

    def _take_varied(self, usual: Trial) -> None:
        for variants in (self.possible.by_params, self.possible.by_extremes, self.possible.by_integers):
            for one in variants(usual):
                if any(goal.by_values for goal in self.aimed) and (possible := self.possible.with_sizes(one)) is not None:
                    self._cover([possible])

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        for one in self._occurring(trial):
            del self.aimed[one]
            self.dear.pop(one, None)

    def _occurring(self, trial: Trial) -> list[Circumstance]:
        case, draw = self._case(trial), trial.setting.draw
        scores = draw.scores if draw.scores != "random" else "steep" if draw.magnitude != 1 else None
        return [one for one in self.aimed if one.scores in (None, scores) and one.occurs(case)]

    def _case(self, trial: Trial) -> Case:
        known = self.problems.known(trial)
        key = (id(known), trial.setting)
        if key not in self._cases:
            self._cases[key] = (known, Case(self.spec, self.plan, trial, known.sample))
        return self._cases[key][1]

    def _wrong_bounds(self, trial: Trial, seen: set[str]) -> set[str]:
        """The changes of the plan's bounds, but those in `seen`, with which a check of the problem would fail."""
        case = self._case(trial)
        corners = {(0, 0), (case.sizes["batch"] - 1, case.sizes["q_heads"] - 1)}
        allowed = {head: case.allowed(*head) for head in corners}
        found: set[str] = set()
        for what, head, computed in wrong_pairs(case, allowed):
            if what not in seen | found and self.problems.known(trial).exercise(self.plan).notices_pairs(
                *head, allowed[head], computed
            ):
                found.add(what)
        return found

    def _seconds(self, trial: Trial) -> float:
        return seconds(self._case(trial))

    def _varied(self, trial: Trial) -> tuple[Trial, set[Goal]]:
        """`trial` with the params, values of captured tensors and magnitude that exercise most of what is left."""
        best, hit = trial, self._hits(trial, {*self.left})
        for variants in (self.possible.by_params, self.possible.by_integers, self._by_magnitude, self.possible.by_seed):
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
        one = self.possible.with_sizes(trial)
        return one if one is not None and self._seconds(one) <= LIMIT else None

    def _by_magnitude(self, trial: Trial) -> Iterator[Trial]:
        if any(isinstance(goal, Alternative) and goal.keyword != "mask" for goal in self.left):
            yield from self.possible.by_magnitude(trial)

    def _hits(self, trial: Trial, goals: set[Goal]) -> set[Goal]:
        """Those of `goals` that the problem exercises."""
        case = self._case(trial)
        found: set[Goal] = {goal for goal in goals if isinstance(goal, Circumstance) and goal.occurs(case)}
        changes = [goal for goal in self.left if goal in goals and isinstance(goal, Alternative)]
        if changes:
            exercise = self.problems.known(trial).exercise(self.plan)
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
            return any(self.possible.of_shape(self.possible.shape(1, *lengths)) is not None for lengths in ((5, 9), (9, 5)))
        possible = [trial for trial in map(self.possible.of_shape, self._long()) if trial is not None]
        every = [
            one for trial in possible for one in (trial, *self.possible.by_params(trial), *self.possible.by_integers(trial))
        ]
        return any(self._hits(one, {goal}) for one in every if self.possible.is_call(one))

    def chosen(self) -> Chosen:
        if self.possible.refusal is not None and all(0 in trial.shape.sizes(self.spec).values() for trial in self.trials):
            raise self.possible.refusal  # every problem that has pairs was refused
        missed = [_sentence(goal) for goal in (*self.left,) if self._is_possible(goal)]
        first, *others = self.trials
        trials = (first, *(one.having(apart=True) for one in others))
        if self.fixed.has_lengths:
            return Chosen(trials, (*missed, *([FIXED] if self.aimed else []), *self.untried))
        dear = [f"{_sentence(one)}; {self._why_dear(trial)}" for one, trial in self.dear.items() if one in self.aimed]
        without = [one for one in self.left if isinstance(one, Circumstance) and _sentence(one) not in missed]
        without += [one for one in self.aimed if one not in self.dear]
        absent = [f"{one} ({one.absent})" if one.absent else str(one) for one in without]
        return Chosen(trials, (*missed, *dear, *self.untried), tuple(absent))

    def _why_dear(self, trial: Trial) -> str:
        lengths = f"--q-len {trial.shape.q_len} --kv-len {trial.shape.kv_len}"
        return f"one would take about {self._seconds(trial):.0f} s here: check it with {lengths}"
