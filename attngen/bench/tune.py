"""The schedules that fit, timed on the GPU: what `attngen tune` does for one case."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attngen.api import CompiledAttention
from attngen.bench.measure import measure
from attngen.bench.report import Timing
from attngen.bench.sweep import Case, problem
from attngen.device.cuda import CudaDevice
from attngen.device.cuda.compiler import cubin
from attngen.device.tuned import Bucket, Winner, bucket_of, remember
from attngen.emit.emitter import emit
from attngen.emit.kernel_source import KernelSource
from attngen.plan import Plan, candidates, choose
from attngen.plan.arch import ARCHES
from attngen.reference.compare import unit_in_last_place
from attngen.reference.torch_oracle import torch_attention
from attngen.spec.attention import HOPPER_RUNGS, Rung, Schedule
from attngen.spec.print_attn import schedule_data
from attngen.torch.arguments import NamedArguments
from attngen.torch.runtime import OnGpu

SCREENING_ROUNDS = 3
FINALISTS = 6
WORTH = 0.99  # of the planner's time: what is less than this faster is not worth another kernel


@dataclass(frozen=True, slots=True)
class Tried:
    """One schedule and its time; the planner's own choice is `planned`."""

    plan: Plan
    schedule: Schedule
    timing: Timing
    planned: bool

    @property
    def title(self) -> str:
        p = self.plan
        return f"{p.block_q} x {p.block_kv}, {p.stages} stage{'s' * (p.stages > 1)}, {p.warps} warp{'s' * (p.warps > 1)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The finalists of a case, the fastest first, out of so many, and what is remembered for its bucket: the planner's own
    choice, where none is worth another kernel."""

    tried: tuple[Tried, ...]
    of: int
    bucket: Bucket
    winner: Winner
    kept: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values; docs/json.md defines the keys."""
        planned = next(t for t in self.tried if t.planned).timing.median
        return {
            "candidates": self.of,
            "remembered": self.kept,
            "bucket": {"log2_keys": self.bucket[0], "log2_rows": self.bucket[1]},
            "finalists": [
                {
                    "kernel": schedule_data(t.schedule),
                    "milliseconds": t.timing.median,
                    "low": t.timing.low,
                    "high": t.timing.high,
                    "speedup": planned / t.timing.median,
                    "is_planned": t.planned,
                    "is_winner": t.schedule == self.winner.schedule,
                }
                for t in self.tried
            ],
        }


def tune(case: Case, params: Mapping[str, int | float], rounds: int, progress: Callable[[str], None]) -> Outcome:
    """Time every schedule that fits of the rung that `auto` or the spec itself means, the most promising again
    and longer, and remember the fastest.

    Raises AssertionError where a candidate computes something else than the planner's choice does: a bug, never remembered.
    """
    spec = case.spec
    place = CudaDevice()
    arch = ARCHES[place.arch]
    rung: Rung = next((r for r in HOPPER_RUNGS if r == choose(spec, arch).rung), "fused")
    planned = choose(spec, arch, rung)
    own = Schedule(rung, planned.block_q, planned.block_kv, planned.stages, planned.warps)
    schedules = list(dict.fromkeys([own, *candidates(spec, arch, rung)]))
    plans = {s: choose(replace(spec, schedule=s), arch, rung) for s in schedules}
    sources = {s: emit(spec, plan) for s, plan in plans.items()}
    _compile_all(list(sources.values()), progress)
    kernels = {s: OnGpu(CompiledAttention(spec, plans[s], place.compile(sources[s]), place)) for s in schedules}
    q, k, v, inputs, own_params = problem(case, params)
    lists = NamedArguments(spec).lists({**inputs, **own_params}, {})
    captured, ints, floats = [*lists, None, None, None][:3]
    calls = {str(i): partial(kernels[s], q, k, v, captured or (), ints or (), floats or ()) for i, s in enumerate(schedules)}
    progress(f"timing {len(calls)} schedules")
    with torch.no_grad():
        screened = measure(calls, SCREENING_ROUNDS)
        best = sorted(calls, key=lambda n: screened[n].median)[:FINALISTS]
        finalists = {n: calls[n] for n in dict.fromkeys(["0", *best])}
        truth, _ = torch_attention(spec, q, k, v, inputs=inputs, params=own_params)
        errors = {n: float((call()[0].double() - truth).abs().max()) for n, call in finalists.items()}
        allowed = 2 * errors["0"] + unit_in_last_place(float(truth.abs().max()), spec.dtype)
        wrong = [plans[schedules[int(n)]] for n, error in errors.items() if not error <= allowed]
        assert not wrong, f"{[(p.block_q, p.block_kv, p.stages, p.warps) for p in wrong]}: {errors}, allowed {allowed}"
        del truth
        timed = measure(finalists, rounds)
    tried = [Tried(plans[s], s, timed[n], s == own) for n, s in ((n, schedules[int(n)]) for n in finalists)]
    tried.sort(key=lambda t: t.timing.median)
    sizes = {"batch": case.batch, "q_heads": case.q_heads, "q_len": case.length, "kv_len": case.length}
    bucket = bucket_of(sizes)
    first, planned_time = tried[0], timed["0"].median
    if first.timing.median >= WORTH * planned_time:
        first = next(t for t in tried if t.planned)
    winner = Winner(first.schedule, first.timing.median, planned_time, torch.cuda.get_device_name())
    return Outcome(tuple(tried), len(calls), bucket, winner, remember(spec, arch.name, bucket, winner))


def _compile_all(sources: list[KernelSource], progress: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for done, _ in enumerate(pool.map(cubin, sources), 1):
            if done % 8 == 0 or done == len(sources):
                progress(f"compiled {done} of {len(sources)} schedules")
