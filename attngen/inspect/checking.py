"""Every schedule of a spec run on a device and compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock, Thread
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.device.emulated.findings import EmulationError
from attngen.device.protocol import Device
from attngen.inspect.block_work import MULTIPROCESSORS
from attngen.inspect.few_heads import few_heads_of, text_for
from attngen.inspect.known import Problems
from attngen.inspect.other_process import OtherProcess, can_fork
from attngen.inspect.prepare import check_call, compile_text, plan_for
from attngen.inspect.run_trial import GradientErrors, run_trial
from attngen.inspect.trial import Fixed, Trial
from attngen.inspect.trials import Chosen, choose_trials
from attngen.plan import Plan
from attngen.plan.facts import DETERMINISTIC
from attngen.plan.plan import Direction
from attngen.reference.compare import Comparison
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV, differentiable

COMPILERS = 2  # kernels that are compiled at a time


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of one problem: its sizes by name, its params, the seed and magnitude of its random arrays."""

    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    seed: int
    magnitude: float
    what: str
    comparison: Comparison  # for a backward, that of the worst gradient, with the wrong elements of all
    run_seconds: float
    gradients: Mapping[str, GradientErrors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """One schedule's result."""

    spec: str
    schedule: str
    template: str
    device: str
    arch: str
    comparison: Comparison  # the result of its worst problem
    compile_seconds: float
    run_seconds: float  # the time of all problems
    problems: tuple[Tried, ...]
    not_exercised: tuple[str, ...]  # by any problem: a wrong kernel may pass
    absent: tuple[str, ...] = ()  # what no problem has, because the mask does not allow it
    direction: Direction = "forward"

    @property
    def problem_text(self) -> str:
        """The sizes and params of the worst problem, and how many others fail too."""
        failed = [one for one in self.problems if not one.comparison.passed]
        worst = max(self.problems, key=lambda one: one.comparison.excess)
        return f"with {worst.what}; {len(failed)} of {len(self.problems)} problems fail"


NOTHING_CHOSEN = Chosen((), ())
Progress = Callable[[str], None]


class Kernel(NamedTuple):
    """A schedule and where it runs: its forward, or the backward that computes the gradients `wanted`."""

    schedule: str
    device: Device
    wanted: tuple[str, ...] = ()
    deterministic: bool = DETERMINISTIC


def check_spec(
    spec: AttentionSpec,
    schedules: tuple[str, ...],
    devices: tuple[Device, ...],
    shape: Shape,
    params: Mapping[str, int | float],
    seed: int,
    text: str | None = None,
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Iterator[Checked]:
    """Run every schedule on every device on one problem, one result at a time; `text` in the place of the CUDA text. With
    `wanted` these are backwards.

    Raises PlanRefusal, ArgumentError and ObligationError at once, before anything is run; the results raise what compiling and
    running raise.
    """
    check_call(spec, shape, params)
    kernels = [Kernel(schedule, device, wanted, deterministic) for schedule in schedules for device in devices]
    chosen = Chosen((Trial(shape, params, seed),), ())
    problems = Problems(spec)
    jobs = [_Job(kernel, spec, plan_for(spec, *kernel), text, problems, chosen) for kernel in kernels]
    return _Running(_Beside("choose", lambda job: job, jobs), _compiling(jobs), lambda _: None).results()


def check_exercised(
    spec: AttentionSpec,
    kernels: Sequence[Kernel],
    fixed: Fixed,
    text: str | None = None,
    progress: Progress = lambda _: None,
    may_fork: bool = False,
) -> Iterator[Checked]:
    """The same on problems that exercise all of the spec and the plan, as far as `fixed` leaves them open (`choose_trials`).
    Many heads that a spec states are checked as few (`attngen.inspect.few_heads`); if a `text` fails so, as many.

    `progress` receives what is done next, in words. If this process `may_fork`, a copy of it runs every other kernel of the
    emulated device.
    """
    problems, of_few = Problems(spec), dict[int | None, Problems]()
    jobs = []
    for kernel in (Kernel(*one) for one in kernels):
        job = _Job(kernel, spec, plan_for(spec, *kernel), text, problems)
        if (few := job.with_few_heads()) is not None:  # schedules share the problems of one number of heads
            few = replace(few, problems=of_few.setdefault(few.spec.q_heads, few.problems))
            job = replace(few, instead=None if text is None else job)
        jobs.append(job)
    is_emulated = all(not job.kernel.device.name.startswith("cuda") for job in jobs)
    other: Other | None = None
    if may_fork and is_emulated and len(jobs) > 1 and can_fork():
        other = OtherProcess(partial(_of_other, jobs))
    running = _Running(_Beside("choose", _Choice(fixed), jobs), _compiling(jobs), progress, other)
    try:
        progress(f"choosing problems for {spec.name}, {jobs[0].kernel.schedule}")
        running.choosing.futures[0].result()
    except BaseException:
        running.end()
        raise
    return running.results()


Made = CompiledAttention | CompiledBackward
Other = OtherProcess[tuple[int, Chosen, float], Checked]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Job:
    """A kernel that is compiled, from `text` if given, and run. If it fails, `instead`, which has all heads, decides."""

    kernel: Kernel
    spec: AttentionSpec
    plan: Plan
    text: str | None
    problems: Problems
    chosen: Chosen = NOTHING_CHOSEN
    instead: _Job | None = None

    def with_few_heads(self) -> _Job | None:
        """The same kernel for a spec with few heads; None if more than the numbers of heads would change."""
        found = few_heads_of(self.spec, self.plan, lambda few: plan_for(few, *self.kernel))
        if found is None:
            return None
        text = None if self.text is None else text_for(self.text, self.spec, found[0])
        return None if self.text is not None and text is None else _Job(self.kernel, *found, text, Problems(found[0]))

    def with_all_heads(self, trials: Sequence[Trial]) -> _Job:
        """The job `instead` on these problems of this one, with as many multiprocessors for each head: what happens to a block
        in them happens there too."""
        assert self.instead is not None
        spec, few = self.instead.spec, self.spec
        heads, kv_heads, few_heads = spec.q_heads, spec.kv_heads, few.q_heads
        assert heads is not None
        assert kv_heads is not None
        assert few_heads is not None
        times = -(-heads // few_heads)
        trials = [
            replace(trial, shape=replace(trial.shape, q_heads=heads, kv_heads=kv_heads)).having(
                multiprocessors=times * (trial.setting.multiprocessors or MULTIPROCESSORS)
            )
            for trial in trials
        ]
        return replace(self.instead, chosen=replace(self.chosen, trials=tuple(trials)))

    def compiled(self) -> tuple[Made, float]:
        """The compiled kernel, and the seconds that it took. Raises the exceptions of compiling."""
        start = perf_counter()
        return compile_text(self.spec, self.plan, self.kernel.device, self.text), perf_counter() - start


class _Choice:
    """Chooses the problems of jobs; kernels of one schedule and one architecture have the same."""

    def __init__(self, fixed: Fixed) -> None:
        self.fixed = fixed
        self._before = dict[tuple[object, ...], Chosen]()

    def __call__(self, job: _Job) -> _Job:
        kernel = job.kernel
        key = (kernel.schedule, kernel.device.arch, bool(kernel.wanted) and job.plan.schedule.is_tiled, job.spec)
        if key not in self._before:
            self._before[key] = choose_trials(job.spec, job.plan, self.fixed, job.problems)
        return replace(job, chosen=self._before[key])


class _Beside(Generic[R]):
    """What `function` returns for each item, in turn, by threads that nobody waits for: an interrupted command ends at once."""

    def __init__(self, name: str, function: Callable[[T], R], items: Sequence[T], threads: int = 1) -> None:
        self.futures = [Future[R]() for _ in items]
        self._waiting = iter([(partial(function, item), future) for item, future in zip(items, self.futures, strict=True)])
        self._lock = Lock()
        for _ in range(min(threads, len(items))):
            Thread(target=self._compute, name=f"attngen-{name}", daemon=True).start()

    def _compute(self) -> None:
        while True:
            with self._lock:
                waiting = next(self._waiting, None)
            if waiting is None:
                return
            compute, future = waiting
            if not future.set_running_or_notify_cancel():
                continue
            try:
                found = compute()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)

    def close(self) -> None:
        for future in self.futures:
            future.cancel()


def _compiling(jobs: Sequence[_Job]) -> _Beside[tuple[Made, float]]:
    return _Beside("compile", _Job.compiled, jobs, COMPILERS)


def _of_other(jobs: Sequence[_Job], given: tuple[int, Chosen, float]) -> Checked:
    """What the other process does: it runs the job of a number, whose kernel is in the cache."""
    number, chosen, seconds = given
    job = replace(jobs[number], chosen=chosen)
    return _final_result(job, lambda: (job.compiled()[0], seconds), lambda _: None)


@dataclass(slots=True)
class _Running:
    """The results of jobs, in their order: each job is run by this process or by the other one, whichever is free first.
    Problems are chosen, kernels are compiled, and what they are compared with is computed, by other threads, while kernels
    before them run."""

    choosing: _Beside[_Job]
    compiling: _Beside[tuple[Made, float]]
    progress: Progress
    other: Other | None = None
    _waiting: Iterator[int] = field(init=False)
    _lock: Lock = field(default_factory=Lock)

    def results(self) -> Iterator[Checked]:
        results = [Future[Checked | None]() for _ in self.choosing.futures]  # None: the other process could not do the job
        self._waiting = iter(range(len(results)))
        if self.other is not None:
            Thread(target=self._give, args=(self.other, results), name="attngen-other", daemon=True).start()
        try:
            for number, result in enumerate(results):
                while not result.done() and (mine := self._next()) is not None:
                    try:
                        results[mine].set_result(self._run(mine))
                    except Exception as error:
                        results[mine].set_exception(error)
                yield result.result() or self._run(number)
        finally:
            self.end()

    def end(self) -> None:
        self.choosing.close()
        self.compiling.close()
        if self.other is not None:
            self.other.end()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._waiting, None)

    def _run(self, number: int) -> Checked:
        return _final_result(self.choosing.futures[number].result(), self.compiling.futures[number].result, self.progress)

    def _give(self, other: Other, results: Sequence[Future[Checked | None]]) -> None:
        while (number := self._next()) is not None:
            try:
                chosen = self.choosing.futures[number].result().chosen
                _, seconds = self.compiling.futures[number].result()
            except BaseException:
                found = None
            else:
                found = other.call((number, chosen, seconds))
            results[number].set_result(found)


def _final_result(job: _Job, compiled_by: Callable[[], tuple[Made, float]], progress: Progress) -> Checked:
    """A job's result; if it fails, that of its `instead` on the problems that failed, or on all after a device's finding."""
    failing = job.chosen.trials
    try:
        found = _result(job, compiled_by, progress)
    except EmulationError:
        if job.instead is None:
            raise
    else:
        if job.instead is None or found.comparison.passed:
            return found
        failing = tuple([t for t, tried in zip(failing, found.problems, strict=True) if not tried.comparison.passed])
    other = job.with_all_heads(failing)
    return _result(other, other.compiled, progress)


def _result(job: _Job, compiled_by: Callable[[], tuple[Made, float]], progress: Progress) -> Checked:
    (schedule, device, wanted, _), spec, plan, chosen = job.kernel, job.spec, job.plan, job.chosen
    name = f"{spec.name}, {schedule}{' backward' if wanted else ''}"
    knowns = [job.problems.known(trial) for trial in chosen.trials]
    with closing(_Beside("reference", lambda known: known.compute(plan), knowns)) as expected:
        progress(f"compiling {name} for {device.name}")
        compiled, compile_seconds = compiled_by()
        tried = []
        for number, (trial, known, computed) in enumerate(zip(chosen.trials, knowns, expected.futures, strict=True), 1):
            progress(f"running {name} on {device.name}: problem {number} of {len(knowns)}")
            found = run_trial(compiled, known, computed, trial)
            of_trial = (trial.shape.sizes(spec), trial.params, trial.seed, trial.setting.draw.magnitude, trial.describe(spec))
            tried.append(Tried(*of_trial, *found))
    others = [n for n in (*QKV, *differentiable(spec)) if n not in wanted] if wanted else []
    missed = (*chosen.missed, *([f"gradients of {', '.join(others)}"] if others else []))
    worst = max(tried, key=lambda one: one.comparison.excess)
    seconds = sum(one.run_seconds for one in tried)
    return Checked(
        spec.name, schedule, plan.schedule.name, device.name, plan.arch.name, worst.comparison, compile_seconds, seconds,
        tuple(tried), missed, chosen.absent, plan.direction,
    )  # fmt: skip
