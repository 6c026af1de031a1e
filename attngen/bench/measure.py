"""Times by CUDA events: medians, with the L2 cache flushed before each call, candidates in random order.

`measure` times single calls. `measure_bursts` times calls that keep the GPU busy, so that its clocks under the power cap are
those of real work, and returns each round, so that candidates can be compared within rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from attngen.bench.report import Timing

FLUSH_BYTES = 2**28  # more than any GPU's L2 cache
WARM_UP = 3
BURST = 12.0  # milliseconds


def measure(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Timings of every candidate: each round times all of them once."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for function in candidates.values():
        for _ in range(WARM_UP):
            function()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in random.sample(sorted(candidates), len(candidates)):
            times[name].append(_milliseconds(candidates[name], flush))
    return {name: _summary(values) for name, values in times.items()}


def _milliseconds(function: Callable[[], object], flush: torch.Tensor) -> float:
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _summary(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], values[0], values[0])
    tenths = quantiles(values, n=10)
    return Timing(median(values), tenths[0], tenths[-1])


@dataclass(frozen=True, slots=True)
class Rounds:
    """The milliseconds of a call of each candidate, in each round."""

    each: tuple[Mapping[str, float], ...]

    def medians(self) -> dict[str, float]:
        """The median of each candidate over the rounds."""
        return {name: median(one[name] for one in self.each) for name in sorted(self.each[0])}

    def ratio(self, name: str, to: str) -> float:
        """The speed of `name` relative to `to`: the median over rounds, so that clocks that change do not matter."""
        return median(one[to] / one[name] for one in self.each)


def measure_bursts(candidates: Mapping[str, Callable[[], object]], rounds: int, milliseconds: float = BURST) -> Rounds:
    """`rounds` rounds after `WARM_UP` more; each times every candidate by the median of a burst of calls.

    A burst is as many calls as take about `milliseconds`, queued at once, the L2 cache flushed before each.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    calls = {name: calls_in(milliseconds, _warm(function, flush)) for name, function in candidates.items()}
    return in_rounds(candidates, rounds, lambda name: median(_burst(candidates[name], calls[name], flush)))


def in_rounds(names: Iterable[str], rounds: int, timed: Callable[[str], float]) -> Rounds:
    """Every candidate timed once per round, in random order, after `WARM_UP` rounds that do not count."""
    ordered = sorted(names)
    each = [{name: timed(name) for name in random.sample(ordered, len(ordered))} for _ in range(WARM_UP + rounds)]
    return Rounds(tuple(each[WARM_UP:]))


def calls_in(milliseconds: float, one: float) -> int:
    """The number of calls, at least one, that take about `milliseconds` if a call takes `one` millisecond."""
    return max(1, round(milliseconds / one))


def _warm(function: Callable[[], object], flush: torch.Tensor) -> float:
    """The milliseconds of a call after a first one, which prepares."""
    function()
    return median(_burst(function, WARM_UP, flush))


def _burst(function: Callable[[], object], calls: int, flush: torch.Tensor) -> list[float]:
    """The milliseconds of each call, by its own events. The host waits only for the last one, so that the GPU is never idle."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in events:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


def peak_bytes(function: Callable[[], object]) -> int:
    """The peak memory in bytes that one call allocates, with its result."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return int(peak)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured limits of this GPU: a large matrix product in TFLOP/s, and a large copy in TB/s read and written."""

    matmul: float
    copy: float


def ceilings(dtype: torch.dtype, rounds: int = 11) -> Ceilings:
    """Measured with torch: an 8192^3 product of randn matrices in `dtype` (true fp32), a copy of 1 GiB."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(dtype)
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = measure({"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds)
    return Ceilings(2 * 8192**3 / (times["matmul"].median * 1e9), 2 * 2**30 / (times["copy"].median * 1e9))
