"""Rungs of a spec traced on the emulated device: exact counts, access sites, and steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from attngen.device.emulated import EmulatedDevice
from attngen.device.emulated.device import Counters
from attngen.device.emulated.tracing import LANES, NOBODY, AccessSite, Step, Watch
from attngen.device.emulated.translate import FMA
from attngen.emit.kernel_source import MULTIPROCESSORS
from attngen.inspect.coordinates import Layout, layouts
from attngen.inspect.prepare import check_call, compile_text, plan_for
from attngen.plan import Plan
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec

_PRODUCT = re.compile(r"^(wg)?mma\..*m(\d+)n(\d+)k(\d+)")
WARPGROUP = 128


@dataclass(frozen=True, slots=True)
class Totals:
    """What one call of a rung asks for. Bytes count each access of each thread, before any cache; `sectors` are the 32 bytes of
    global memory that each execution by a warp touches; `barriers` are those that opened, of the block, of a warp or of some
    warps; `mma` instructions are of a warp, or of a warpgroup; `fma` are calls of fmaf, of each thread."""

    global_read: int
    global_written: int
    sectors: int
    shared_read: int
    shared_written: int
    wavefronts: int
    conflicts: int
    barriers: int
    mma: int
    mma_operations: int
    fma: int
    idle_lanes: int
    lanes: int

    @property
    def operations(self) -> int:
        """Multiplications and additions: of matrix products, and of ordinary multiply-adds."""
        return self.mma_operations + 2 * self.fma


@dataclass(frozen=True, slots=True)
class RungTrace:
    """One rung traced. `read` and `written` are global bytes by tensor; `layouts` say where its elements lie."""

    rung: str
    plan: Plan
    totals: Totals
    read: Mapping[str, int]
    written: Mapping[str, int]
    sites: tuple[AccessSite, ...]
    steps: tuple[Step, ...]
    layouts: Mapping[str, Layout]
    seconds: float


def trace_spec(
    spec: AttentionSpec,
    rungs: Sequence[str],
    arch: str,
    shape: Shape,
    params: Mapping[str, int | float],
    watch: Watch = NOBODY,
    text: str | None = None,
    seed: int = 0,
) -> Iterator[RungTrace]:
    """Trace every rung, one result at a time; `text` in the place of the CUDA text.

    Raises PlanRefusal, ArgumentError and ObligationError at once, before anything is run; the results raise EmulationError for
    what a kernel does that it must not, and what compiling raises.
    """
    check_call(spec, shape, params)
    devices = [EmulatedDevice(arch=arch, watch=watch, seed=seed) for _ in rungs]
    planned = [(rung, plan_for(spec, rung, device), device) for rung, device in zip(rungs, devices, strict=True)]
    return _traced(spec, planned, shape, params, text)


def _traced(
    spec: AttentionSpec,
    planned: Sequence[tuple[str, Plan, EmulatedDevice]],
    shape: Shape,
    params: Mapping[str, int | float],
    text: str | None,
) -> Iterator[RungTrace]:
    problem = sample(spec, shape)
    for rung, plan, device in planned:
        compiled = compile_text(spec, plan, device, text)
        start = perf_counter()
        named: dict[str, Any] = {**problem.inputs, **params}
        compiled(problem.q, problem.k, problem.v, **named)
        kernel: Any = compiled.kernel
        sizes = {**shape.sizes(spec), MULTIPROCESSORS: compiled.device.multiprocessors}
        yield RungTrace(
            rung,
            compiled.plan,
            totals(kernel.counters, kernel.traced.sites),
            kernel.counters.bytes_read,
            kernel.counters.bytes_written,
            kernel.traced.sites,
            kernel.traced.steps,
            layouts(compiled.source, compiled.plan, sizes),
            perf_counter() - start,
        )


def totals(counters: Counters, sites: Sequence[AccessSite]) -> Totals:
    """The sums of a call."""
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
