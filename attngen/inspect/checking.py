"""Every rung of a spec run on a device and compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from attngen.api import CompiledAttention
from attngen.device.protocol import Device
from attngen.inspect.prepare import check_call, compile_text, plan_for
from attngen.inspect.trials import Chosen, Fixed, Trial, choose_trials
from attngen.plan import Plan
from attngen.reference.compare import Comparison, Truth, compare, truth
from attngen.reference.problems import Sample, Shape
from attngen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of one problem: its sizes by name, its params, the seed and magnitude of its random arrays."""

    sizes: Mapping[str, int]
    params: Mapping[str, int | float]
    seed: int
    magnitude: float
    what: str
    comparison: Comparison
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Checked:
    """One rung's result: `comparison` is that of its worst problem, `run_seconds` the sum. A wrong kernel may pass in what is
    `not_exercised` by any problem."""

    spec: str
    rung: str
    schedule: str
    device: str
    arch: str
    comparison: Comparison
    compile_seconds: float
    run_seconds: float
    problems: tuple[Tried, ...]
    not_exercised: tuple[str, ...]

    @property
    def problem_text(self) -> str:
        """The sizes and params of the worst problem, and how many others fail too."""
        failed = [one for one in self.problems if not one.comparison.passed]
        worst = max(self.problems, key=lambda one: one.comparison.excess)
        return f"with {worst.what}; {len(failed)} of {len(self.problems)} problems fail"


Progress = Callable[[str], None]
Kernel = tuple[str, Device]  # a rung and where it runs


def check_spec(
    spec: AttentionSpec,
    rungs: tuple[str, ...],
    devices: tuple[Device, ...],
    shape: Shape,
    params: Mapping[str, int | float],
    seed: int,
    text: str | None = None,
) -> Iterator[Checked]:
    """Run every rung on every device on one problem, one result at a time; `text` in the place of the CUDA text.

    Raises PlanRefusal, ArgumentError and ObligationError at once, before anything is run; the results raise what compiling and
    running raise.
    """
    check_call(spec, shape, params)
    kernels = [(rung, device) for rung in rungs for device in devices]
    chosen = Chosen((Trial(shape, params, seed),), ())
    return _results(spec, [(*kernel, plan_for(spec, *kernel), chosen) for kernel in kernels], text, lambda _: None)


def check_exercised(
    spec: AttentionSpec,
    kernels: Sequence[Kernel],
    fixed: Fixed,
    text: str | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Checked]:
    """The same on problems that exercise all of the spec and the plan, as far as `fixed` leaves them open (`choose_trials`).

    `progress` receives what is done next, in words.
    """
    planned = []
    known: dict[tuple[str, str], Chosen] = {}
    for rung, device in kernels:
        plan = plan_for(spec, rung, device)
        if (rung, device.arch) not in known:
            progress(f"choosing problems for {spec.name}, {rung}")
            known[rung, device.arch] = choose_trials(spec, plan, fixed)
        planned.append((rung, device, plan, known[rung, device.arch]))
    return _results(spec, planned, text, progress)


def _results(
    spec: AttentionSpec, planned: Sequence[tuple[str, Device, Plan, Chosen]], text: str | None, progress: Progress
) -> Iterator[Checked]:
    solved: dict[int, list[tuple[Trial, Sample, Truth]]] = {}  # by the identity of the problems, which outlive the call
    for rung, device, plan, chosen in planned:
        progress(f"compiling {spec.name}, {rung} for {device.name}")
        start = perf_counter()
        compiled = compile_text(spec, plan, device, text)
        compile_seconds = perf_counter() - start
        if id(chosen) not in solved:
            problems = [(trial, trial.problem(spec)) for trial in chosen.trials]
            solved = {id(chosen): [(trial, problem, truth(spec, problem, trial.params)) for trial, problem in problems]}
        tried = []
        for number, (trial, problem, expected) in enumerate(solved[id(chosen)], 1):
            progress(f"running {spec.name}, {rung} on {device.name}: problem {number} of {len(chosen.trials)}")
            tried.append(_try(compiled, trial, problem, expected))
        yield _checked(compiled, rung, compile_seconds, tried, chosen.missed)


def _try(compiled: CompiledAttention, trial: Trial, problem: Sample, expected: Truth) -> Tried:
    spec = compiled.spec
    start = perf_counter()
    output, lse = _call(compiled, problem, trial.params)
    done = perf_counter() - start
    found = compare(output, lse, expected)
    return Tried(
        trial.shape.sizes(spec), trial.params, trial.seed, trial.draw.magnitude, trial.describe(spec), found, done
    )  # fmt: skip


def _checked(
    compiled: CompiledAttention, rung: str, compile_seconds: float, tried: Sequence[Tried], missed: tuple[str, ...]
) -> Checked:
    worst = max(tried, key=lambda one: one.comparison.excess)
    plan, device = compiled.plan, compiled.device
    seconds = sum(one.run_seconds for one in tried)
    return Checked(
        compiled.spec.name, rung, plan.schedule, device.name, plan.arch.name, worst.comparison, compile_seconds, seconds,
        tuple(tried), missed,
    )  # fmt: skip


def _call(compiled: CompiledAttention, problem: Sample, params: Mapping[str, int | float]) -> tuple[Any, Any]:
    """O and lse as numpy storage arrays, wherever the kernel ran."""
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    on_gpu = compiled.device.name.startswith("cuda")
    if on_gpu:
        from attngen.inspect.gpu_memory import to_gpu

        arrays = {name: to_gpu(array) for name, array in arrays.items()}
    q, k, v = (arrays.pop(n) for n in "qkv")
    out = None if on_gpu else _poisoned(problem, compiled.spec)
    named: dict[str, Any] = {**arrays, **params}
    result = compiled(q, k, v, out=out, **named)
    output, lse = result if compiled.spec.lse else (result, None)
    if on_gpu:
        from attngen.inspect.gpu_memory import from_gpu

        return from_gpu(output), None if lse is None else from_gpu(lse)
    return output, lse


def _poisoned(problem: Sample, spec: AttentionSpec) -> Any:
    """An output full of NaN: an element that no thread writes then fails the comparison."""
    out = np.empty((*problem.q.shape[:3], spec.head_dim_v), spec.dtype.numpy)
    out.view(np.uint8)[...] = 0xFF
    return out
