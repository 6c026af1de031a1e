"""Every rung of a spec run on a device and compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from attngen.api import CompiledAttention
from attngen.device.protocol import Device
from attngen.inspect.prepare import check_call, compile_text, plan_for
from attngen.plan import Plan
from attngen.reference.compare import Comparison, Truth, compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.spec.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class Checked:
    """One rung's result."""

    spec: str
    rung: str
    schedule: str
    device: str
    comparison: Comparison
    compile_seconds: float
    run_seconds: float


def check_spec(
    spec: AttentionSpec,
    rungs: tuple[str, ...],
    devices: tuple[Device, ...],
    shape: Shape,
    params: Mapping[str, int | float],
    seed: int,
    text: str | None = None,
) -> Iterator[Checked]:
    """Run every rung on every device, one result at a time; `text` in the place of the CUDA text.

    Raises PlanRefusal, ArgumentError and ObligationError at once, before anything is run; the results raise what compiling and
    running raise.
    """
    check_call(spec, shape, params)
    planned = [(rung, plan_for(spec, rung, device), device) for rung in rungs for device in devices]
    return _results(spec, planned, shape, params, seed, text)


def _results(
    spec: AttentionSpec,
    planned: Sequence[tuple[str, Plan, Device]],
    shape: Shape,
    params: Mapping[str, int | float],
    seed: int,
    text: str | None,
) -> Iterator[Checked]:
    problem = sample(spec, shape, seed)
    expected = truth(spec, problem, params)
    for rung, plan, device in planned:
        start = perf_counter()
        compiled = compile_text(spec, plan, device, text)
        yield _run(compiled, rung, problem, expected, params, perf_counter() - start)


def _run(
    compiled: CompiledAttention,
    rung: str,
    problem: Sample,
    expected: Truth,
    params: Mapping[str, int | float],
    compile_seconds: float,
) -> Checked:
    start = perf_counter()
    output, lse = _call(compiled, problem, params)
    done = perf_counter()
    comparison = compare(output, lse, expected)
    device = compiled.device.name
    return Checked(compiled.spec.name, rung, compiled.plan.schedule, device, comparison, compile_seconds, done - start)


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
