"""`attngen tune` for one case: the tiles of a forward or of a backward that fit, timed on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch

from attngen.api import CompiledAttention, compile
from attngen.backward import CompiledBackward
from attngen.bench.arguments import Arguments, Tensors, arguments
from attngen.bench.measure import measure
from attngen.bench.report import Timing
from attngen.bench.sweep import Case, problem
from attngen.device.arrays import view
from attngen.device.cuda import CudaDevice
from attngen.device.cuda.compiler import cubin
from attngen.device.tuning_cache import Bucket, Winner, bucket_of, remember
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.plan import Plan
from attngen.plan.arch import ARCHES
from attngen.plan.facts import DETERMINISTIC
from attngen.reference.compare import unit_in_last_place
from attngen.reference.torch_oracle import torch_attention, torch_gradients
from attngen.schedules import alternatives, choose, parts_of, title_of
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.gradient import gradient_argument

SCREENING_ROUNDS = 3
FINALISTS = 6
WORTH = 0.99  # share of the planner's time: a smaller gain does not justify another kernel


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and its time; `planned` marks the planner's choice."""

    plan: Plan
    kernel: KernelRequest
    timing: Timing
    planned: bool

    @property
    def title(self) -> str:
        return title_of(self.kernel)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found for a case."""

    tried: tuple[Tried, ...]  # the finalists, the fastest first
    of: int  # candidates
    bucket: Bucket
    winner: Winner  # remembered for the bucket: the planner's choice if no other is WORTH a kernel
    kept: bool

    def to_json(self) -> dict[str, object]:
        """Plain values; docs/json.md defines the keys."""
        planned = next(t for t in self.tried if t.planned).timing.median
        return {
            "candidates": self.of,
            "remembered": self.kept,
            "bucket": {"log2_keys": self.bucket[0], "log2_rows": self.bucket[1]},
            "finalists": [
                {
                    "kernel": asdict(t.kernel),
                    "milliseconds": t.timing.median,
                    "low": t.timing.low,
                    "high": t.timing.high,
                    "speedup": planned / t.timing.median,
                    "is_planned": t.planned,
                    "is_winner": t.kernel == self.winner.kernel,
                }
                for t in self.tried
            ],
        }


def parts(spec: AttentionSpec, wanted: tuple[str, ...], deterministic: bool) -> tuple[tuple[str, ...], ...]:
    """The gradients `wanted` in the parts that have a program each on this GPU; of the forward, one part without gradients."""
    return parts_of(spec, ARCHES[CudaDevice().arch], None, wanted, deterministic) if wanted else ((),)


def tune(
    case: Case,
    params: Mapping[str, int | float],
    rounds: int,
    progress: Callable[[str], None],
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Outcome:
    """Time all tiles that fit the spec's schedule (or the one that `auto` selects), time the best again for longer, and
    remember the fastest: of the forward, or of the backward with the gradients `wanted`, with the same bits in every run if
    `deterministic`.

    Raises AssertionError if a candidate computes something else than the planner's choice: a bug, never remembered.
    """
    spec = case.spec
    place = CudaDevice()
    arch = ARCHES[place.arch]
    planned = choose(spec, arch, wanted=wanted, deterministic=deterministic)
    plans = alternatives(planned)
    sources = {request: emit(spec, plan) for request, plan in plans.items()}
    _compile_all(list(sources.values()), progress)
    q, k, v, inputs, own_params = problem(case, params)
    given = arguments(spec, (q, k, v), inputs, own_params)
    if wanted:
        given = given.with_loss(spec).with_results(compile(spec, kernel=planned.keyword, device=place))
    kind = CompiledBackward if wanted else CompiledAttention
    calls = {r: given.call(kind(spec, plan, place.compile(sources[r]), place)) for r, plan in plans.items()}
    progress(f"timing {len(calls)} schedules")
    own, *_ = plans
    named = {str(i): request for i, request in enumerate(plans)}
    with torch.no_grad():
        screened = measure({name: calls[r] for name, r in named.items()}, SCREENING_ROUNDS)
        best = sorted(named, key=lambda n: screened[n].median)[:FINALISTS]
        finalists = {n: named[n] for n in dict.fromkeys(["0", *best])}
        check_results({r: calls[r]() for r in finalists.values()}, own, _truth(spec, given, own_params, wanted))
        timed = measure({n: calls[r] for n, r in finalists.items()}, rounds)
    tried = [Tried(plans[r], r, timed[n], r == own) for n, r in finalists.items()]
    tried.sort(key=lambda t: t.timing.median)
    sizes = {"batch": case.batch, "q_heads": case.q_heads, "q_len": case.q_len, "kv_len": case.length}
    bucket = bucket_of(sizes)
    first, planned_time = tried[0], timed["0"].median
    if first.timing.median >= WORTH * planned_time:
        first = next(t for t in tried if t.planned)
    winner = Winner(first.kernel, first.timing.median, planned_time, torch.cuda.get_device_name())
    kept = remember(spec, arch.name, bucket, winner, wanted, deterministic)
    return Outcome(tuple(tried), len(calls), bucket, winner, kept)


def _truth(spec: AttentionSpec, given: Arguments, params: Mapping[str, int | float], wanted: tuple[str, ...]) -> Tensors:
    """What a call returns, in float64."""
    tensors = {name: given.tensors[name] for name in ("q", "k", "v", *(i.name for i in spec.inputs))}
    if wanted:
        found = torch_gradients(spec, tensors, params, given.tensors["dout"], wanted)
        return {gradient_argument(name): gradient for name, gradient in found.items()}
    q, k, v, *inputs = tensors.values()
    named = dict(zip((i.name for i in spec.inputs), inputs, strict=True))
    return {"out": torch_attention(spec, q, k, v, inputs=named, params=params)[0]}


def check_results(found: Mapping[KernelRequest, Tensors], planned: KernelRequest, truth: Tensors) -> None:
    """Raises AssertionError if a result has more than twice the error of the planner's choice, and a unit in the last place."""
    for name, exact in truth.items():
        errors = {r: float((results[name].double() - exact).abs().max()) for r, results in found.items()}
        unit = unit_in_last_place(float(exact.abs().max()), view(found[planned][name], name).dtype)
        allowed = 2 * errors[planned] + unit
        wrong = [r for r, error in errors.items() if not error <= allowed]
        assert not wrong, f"{name} of {wrong}: {errors}, allowed {allowed}"


def _compile_all(sources: list[Program], progress: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for done, _ in enumerate(pool.map(cubin, sources), 1):
            if done % 8 == 0 or done == len(sources):
                progress(f"compiled {done} of {len(sources)} schedules")
