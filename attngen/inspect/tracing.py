"""Schedules of a spec traced on the emulated device: exact counts, access sites, and steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from attngen.backward import CompiledBackward
from attngen.device.emulated import EmulatedDevice
from attngen.device.emulated.device import Counters
from attngen.device.emulated.tracing import LANES, NOBODY, AccessSite, Step, Traced, Watch
from attngen.device.emulated.translate import FMA
from attngen.emit.program import MULTIPROCESSORS
from attngen.inspect.backward import backward_inputs, run_backward
from attngen.inspect.coordinates import Layout, layouts
from attngen.inspect.prepare import check_call, compile_text, plan_for, values_of
from attngen.plan import Plan
from attngen.plan.facts import DETERMINISTIC
from attngen.reference.gradients import sample_loss
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Shape, sample
from attngen.reference.stored import Arguments, stored, stored_sizes
from attngen.spec.attention import AttentionSpec

_PRODUCT = re.compile(r"^(wg)?mma\..*m(\d+)n(\d+)k(\d+)")
WARPGROUP = 128


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of one call. Bytes count each access of each thread, before any cache."""

    global_read: int
    global_written: int
    sectors: int  # pieces of 32 bytes of global memory, touched by each execution by a warp
    shared_read: int
    shared_written: int
    wavefronts: int
    conflicts: int
    barriers: int  # completed: of blocks, warps or groups of warps
    mma: int  # instructions of warps or warpgroups
    mma_operations: int
    fma: int  # calls of fmaf by each thread
    idle_lanes: int
    lanes: int

    @property
    def operations(self) -> int:
        """Multiplications and additions: of matrix products, and of ordinary multiply-adds."""
        return self.mma_operations + 2 * self.fma


@dataclass(frozen=True, slots=True)
class ScheduleTrace:
    """The trace of one schedule."""

    schedule: str
    plan: Plan
    totals: Totals
    read: Mapping[str, int]  # global bytes by tensor
    written: Mapping[str, int]
    workspace: int  # bytes written to workspaces
    sites: tuple[AccessSite, ...]
    steps: tuple[Step, ...]
    layouts: Mapping[str, Layout]
    seconds: float


def trace_spec(
    spec: AttentionSpec,
    schedules: Sequence[str],
    arch: str,
    shape: Shape,
    params: Mapping[str, int | float],
    watch: Watch | None = NOBODY,
    text: str | None = None,
    seed: int = 0,
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Iterator[ScheduleTrace]:
    """Traces every schedule, one result at a time; `text` replaces the CUDA text. With `wanted` these are backwards. Without
    `watch` the counts of the device are all: there are no sites and steps, and what is counted by site is 0.

    Raises PlanRefusal, ArgumentError and ObligationError at once, before anything runs. The results raise EmulationError for
    mistakes of a kernel, and the exceptions of compiling.
    """
    check_call(spec, shape, params)
    devices = [EmulatedDevice(arch=arch, watch=watch, seed=seed) for _ in schedules]
    planned = [
        (schedule, plan_for(spec, schedule, device, wanted, deterministic), device)
        for schedule, device in zip(schedules, devices, strict=True)
    ]
    return _traced(spec, planned, shape, params, text)


def _traced(
    spec: AttentionSpec,
    planned: Sequence[tuple[str, Plan, EmulatedDevice]],
    shape: Shape,
    params: Mapping[str, int | float],
    text: str | None,
) -> Iterator[ScheduleTrace]:
    problem = sample(spec, shape)
    for schedule, plan, device in planned:
        compiled = compile_text(spec, plan, device, text)
        start = perf_counter()
        if isinstance(compiled, CompiledBackward):
            forward, loss = numpy_attention(spec, problem, params), sample_loss(spec, problem)
            run_backward(compiled, backward_inputs(spec, plan, problem, loss, forward), values_of(spec, params))
        else:
            named: Arguments = {**stored(spec, problem), **params}
            compiled(**named)
        kernel: Any = compiled.kernel
        traced = kernel.traced or Traced((), ())
        sizes = {**shape.sizes(spec), **stored_sizes(spec, shape), MULTIPROCESSORS: compiled.device.multiprocessors}
        yield ScheduleTrace(
            schedule,
            compiled.plan,
            totals(kernel.counters, traced.sites),
            kernel.counters.bytes_read,
            kernel.counters.bytes_written,
            sum(kernel.counters.bytes_written[t.name] for t in compiled.source.of_role("workspace")),
            traced.sites,
            traced.steps,
            layouts(compiled.source, compiled.plan, sizes),
            perf_counter() - start,
        )


def totals(counters: Counters, sites: Sequence[AccessSite]) -> Totals:
    products = [(match, n) for op, n in counters.instructions.items() if (match := _PRODUCT.match(op))]
    warp_wide = [(int(m[2]) * int(m[3]) * int(m[4]), n // (WARPGROUP if m[1] else LANES)) for m, n in products]
    lanes = [s for s in sites if s.counts_lanes]
    return Totals(
        sum(counters.bytes_read.values()),
        sum(counters.bytes_written.values()),
        sum(s.sectors for s in sites),
        counters.shared_bytes_read,
        counters.shared_bytes_written,
        sum(s.wavefronts for s in sites),
        sum(s.conflicts for s in sites),
        counters.barriers,
        sum(n for _, n in warp_wide),
        sum(2 * size * n for size, n in warp_wide),
        counters.instructions.get(FMA, 0),
        sum(s.idle_lanes for s in lanes),
        sum(LANES * s.executions for s in lanes),
    )
