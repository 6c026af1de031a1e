"""Times by CUDA events: the L2 cache flushed before each call, candidates in random order, medians."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from attngen.bench.report import Timing

FLUSH_BYTES = 2**28  # more than any GPU's L2 cache
WARM_UP = 3


def measure(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """`rounds` timings of every candidate, all of them in each round."""
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


def peak_bytes(function: Callable[[], object]) -> int:
    """What one call allocates at its peak, its result included."""
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
    """What this GPU does at most, measured here: a large matrix product, TFLOP/s, and a large copy, TB/s read and written."""

    matmul: float
    copy: float


def ceilings(dtype: torch.dtype, rounds: int = 11) -> Ceilings:
    """Measured with torch: an 8192^3 product of randn matrices in `dtype` (true fp32), a copy of 1 GiB."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(dtype)
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = measure({"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds)
    return Ceilings(2 * 8192**3 / (times["matmul"].median * 1e9), 2 * 2**30 / (times["copy"].median * 1e9))
