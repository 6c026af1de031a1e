"""Every schedule of a spec run on a device and compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.device.protocol import Device
from attngen.emit.emitter import emit
from attngen.inspect.backward import backward_inputs, run_backward
from attngen.inspect.known import Fixed, Known, Problems, Trial
from attngen.inspect.prepare import check_call, compile_text, plan_for
from attngen.inspect.trials import Chosen, choose_trials
from attngen.plan import Plan
from attngen.plan.facts import DETERMINISTIC
from attngen.plan.heads_in_l2 import HeadsInL2
from attngen.plan.plan import Direction
from attngen.reference.compare import Comparison, compare
from attngen.reference.compare_gradients import compare_gradients
from attngen.reference.problems import Sample, Shape
from attngen.reference.stored import apart, dense, stored, with_layout
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV, differentiable

COMPILERS = 2  # kernels that are compiled at a time
FEW_HEADS = HeadsInL2(1, 2, 2)  # numbered together


class GradientErrors(NamedTuple):
    """The largest error of one gradient, and its bound."""

    error: float
    allowed: float


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of one problem: its sizes by name, its params, the seed and magnitude of its random arrays."""

    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    seed: int
    magnitude: float
    what: str
    comparison: Comparison  # of a backward: of the gradient that is worst, with the wrong elements of all
    run_seconds: float
    gradients: Mapping[str, GradientErrors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """One schedule's result: `comparison` is that of its worst problem, `run_seconds` the sum. A wrong kernel may pass in what
    is `not_exercised` by any problem. What is `absent` no problem has, because the mask does not allow it."""

    spec: str
    schedule: str
    template: str
    device: str
    arch: str
    comparison: Comparison
    compile_seconds: float
    run_seconds: float
    problems: tuple[Tried, ...]
    not_exercised: tuple[str, ...]
    absent: tuple[str, ...] = ()
    direction: Direction = "forward"

    @property
    def problem_text(self) -> str:
        """The sizes and params of the worst problem, and how many others fail too."""
        failed = [one for one in self.problems if not one.comparison.passed]
        worst = max(self.problems, key=lambda one: one.comparison.excess)
        return f"with {worst.what}; {len(failed)} of {len(self.problems)} problems fail"


C = TypeVar("C", CompiledAttention, CompiledBackward)
Progress = Callable[[str], None]
Computed = Future[None]  # what a problem's results are compared with
Found = tuple[Comparison, float, Mapping[str, GradientErrors]]  # of a problem; the seconds of the run


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
    planned = [(kernel, plan_for(spec, *kernel), chosen) for kernel in kernels]
    compiling = _Compiling(spec, [(kernel.device, plan) for kernel, plan, _ in planned], text)
    return _results(planned, Problems(spec), compiling, lambda _: None)


def check_exercised(
    spec: AttentionSpec, kernels: Sequence[Kernel], fixed: Fixed, text: str | None = None, progress: Progress = lambda _: None
) -> Iterator[Checked]:
    """The same on problems that exercise all of the spec and the plan, as far as `fixed` leaves them open (`choose_trials`).

    `progress` receives what is done next, in words.
    """
    problems = Problems(spec)
    plans = [(Kernel(*kernel), plan_for(spec, *kernel)) for kernel in kernels]
    compiling = _Compiling(spec, [(kernel.device, plan) for kernel, plan in plans], text)
    planned, known = [], dict[tuple[str, str, bool], Chosen]()
    try:
        for kernel, plan in plans:
            key = (kernel.schedule, kernel.device.arch, bool(kernel.wanted) and plan.schedule.is_tiled)
            if key not in known:
                progress(f"choosing problems for {spec.name}, {kernel.schedule}")
                known[key] = choose_trials(spec, plan, fixed, problems)
            planned.append((kernel, plan, known[key]))
    except BaseException:
        compiling.cancel()
        raise
    return _results(planned, problems, compiling, progress)


Made = CompiledAttention | CompiledBackward


class _Compiling:
    """Kernels that threads compile one after another, which nobody waits for: a command that is interrupted ends at once."""

    def __init__(self, spec: AttentionSpec, kernels: Sequence[tuple[Device, Plan]], text: str | None) -> None:
        self.spec, self.text = spec, text
        self.kernels = [(*kernel, Future[tuple[Made, float]]()) for kernel in kernels]
        self._next = iter(self.kernels)
        self._lock = Lock()
        for _ in range(min(COMPILERS, len(self.kernels))):
            Thread(target=self._compile, name="attngen-compile", daemon=True).start()

    def _compile(self) -> None:
        while True:
            with self._lock:
                device, plan, future = next(self._next, (None, None, None))
            if device is None or plan is None or future is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            start = perf_counter()
            try:
                made = compile_text(self.spec, plan, device, self.text)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result((made, perf_counter() - start))

    def result(self, number: int) -> tuple[Made, float]:
        """A compiled kernel, and the seconds that it took. Raises the exceptions of compiling."""
        return self.kernels[number][2].result()

    def cancel(self) -> None:
        for *_, future in self.kernels:
            future.cancel()


def _results(
    planned: Sequence[tuple[Kernel, Plan, Chosen]], problems: Problems, compiling: _Compiling, progress: Progress
) -> Iterator[Checked]:
    """Kernels are compiled, and what they are compared with is computed, by other threads, while those before run."""
    try:
        for number, ((schedule, device, wanted, _), plan, chosen) in enumerate(planned):
            spec = problems.spec
            name = f"{spec.name}, {schedule}{' backward' if wanted else ''}"
            knowns = [problems.known(trial) for trial in chosen.trials]
            with _computed_beside(knowns, plan) as expected:
                progress(f"compiling {name} for {device.name}")
                compiled, compile_seconds = compiling.result(number)
                tried = []
                for position, (trial, known, computed) in enumerate(zip(chosen.trials, knowns, expected, strict=True), 1):
                    progress(f"running {name} on {device.name}: problem {position} of {len(expected)}")
                    run = _run_backward if isinstance(compiled, CompiledBackward) else _run
                    found = run(compiled, known, computed, trial)  # type: ignore[arg-type]
                    of_trial = (trial.shape.sizes(spec), trial.params, trial.seed, trial.draw.magnitude, trial.describe(spec))
                    tried.append(Tried(*of_trial, *found))
            others = [n for n in (*QKV, *differentiable(spec)) if n not in wanted] if wanted else []
            missed = (*chosen.missed, *([f"gradients of {', '.join(others)}"] if others else []))
            worst = max(tried, key=lambda one: one.comparison.excess)
            seconds = sum(one.run_seconds for one in tried)
            yield Checked(
                spec.name, schedule, plan.schedule.name, device.name, plan.arch.name, worst.comparison, compile_seconds,
                seconds, tuple(tried), missed, chosen.absent, plan.direction,
            )  # fmt: skip
    finally:
        compiling.cancel()


@contextmanager
def _computed_beside(knowns: Sequence[Known], plan: Plan) -> Iterator[list[Computed]]:
    """What the results of `plan` are compared with, problem after problem, by a thread that nobody waits for: a command that is
    interrupted ends at once."""
    futures: list[Computed] = [Future() for _ in knowns]

    def compute() -> None:
        for known, future in zip(knowns, futures, strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                known.compute(plan)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    Thread(target=compute, name="attngen-reference", daemon=True).start()
    try:
        yield futures
    finally:
        for future in futures:
            future.cancel()


def _run_backward(compiled: CompiledBackward, known: Known, computed: Computed, trial: Trial) -> Found:
    """Of `trial`: what is known of its problem may have been computed for one with other strides."""
    arrays = backward_inputs(compiled.spec, compiled.plan, known.sample, known.loss, known.truth.reference)
    start = perf_counter()
    gradients = run_backward(_on_device_of(compiled, trial), arrays, trial.params, trial.apart, trial.laid_out)
    done = perf_counter() - start
    computed.result()
    each = compare_gradients(gradients, known.gradients(compiled.plan))
    worst = max(each.values(), key=lambda one: one.excess)
    wrong = tuple(tensor for one in each.values() for tensor in one.wrong)
    errors = {name: GradientErrors(one.error, one.allowed) for name, one in each.items()}
    return replace(worst, wrong=wrong), done, errors


def _run(compiled: CompiledAttention, known: Known, computed: Computed, trial: Trial) -> Found:
    start = perf_counter()
    output, lse = _call(_on_device_of(compiled, trial), known.sample, trial)
    done = perf_counter() - start
    computed.result()
    return compare(output, lse, known.truth), done, {}


def _on_device_of(compiled: C, trial: Trial) -> C:
    """The same kernel on an emulated device with the multiprocessors of `trial`; GPUs have theirs. If few heads are numbered
    together, its launches have another number of them."""
    if trial.sections:
        plan = replace(compiled.plan, heads_in_l2=FEW_HEADS)
        source = replace(emit(compiled.spec, plan), text=compiled.source.text)
        compiled = replace(compiled, plan=plan, kernel=compiled.device.compile(source))
    if not trial.multiprocessors or compiled.device.name.startswith("cuda"):
        return compiled
    from attngen.device.emulated.device import EmulatedDevice

    assert isinstance(compiled.device, EmulatedDevice)
    return replace(compiled, device=replace(compiled.device, multiprocessors=trial.multiprocessors))


def _call(compiled: CompiledAttention, problem: Sample, trial: Trial) -> tuple[Any, Any]:
    """O and lse as numpy storage arrays, wherever the kernel ran."""
    arrays = stored(compiled.spec, problem)
    on_gpu = compiled.device.name.startswith("cuda")
    if on_gpu:
        from attngen.inspect.gpu_memory import to_gpu

        arrays = {name: array if isinstance(array, int) else to_gpu(array) for name, array in arrays.items()}
    q, k, v = (arrays.pop(n) for n in "qkv")
    out = None if on_gpu else _poisoned(q, compiled.spec)
    if out is not None and trial.apart:
        q, k, v, out = apart([q, k, v, out])
    if trial.laid_out and not on_gpu:
        name, layout = trial.laid_out
        q, k, v = (with_layout(array, layout) if n == name else array for n, array in zip("qkv", (q, k, v), strict=True))
    named: dict[str, Any] = {**arrays, **trial.params}
    result = compiled(q, k, v, out=out, **named)
    output, lse = result if compiled.spec.lse else (result, None)
    if on_gpu:
        from attngen.inspect.gpu_memory import from_gpu

        output, lse = from_gpu(output), None if lse is None else from_gpu(lse)
    return dense(compiled.spec, problem, output, lse)


def _poisoned(q: Any, spec: AttentionSpec) -> Any:
    """An output full of NaN: an element that no thread writes then fails the comparison."""
    out = np.empty((*q.shape[:-1], spec.head_dim_v), spec.dtype.numpy)
    out.view(np.uint8)[...] = 0xFF
    return out
