"""The same variants, each alone for a second at a time: a GPU at its power limit clocks each kernel as its own work allows.

Rounds that time kernels in turn, a few milliseconds each, give them all one clock. Whoever trains with one of them for hours
has the rates of this table.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from cell import Row
from words import markdown

import attngen
from attngen.bench.measure import calls_in, in_rounds
from attngen.reference.torch_oracle import allowed_pairs
from portable_parts.variants import VARIANTS, captured

STRETCH = 1000.0  # milliseconds of calls without a pause; the second half counts
CLOCK = ("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0")


def rows(rounds: int) -> Iterator[Row]:
    """Stretches of all variants in random order, `rounds` times; L2 is not flushed: the tensors are five times as large."""
    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda").bfloat16() for _ in range(3))
    calls: dict[str, Callable[[], object]] = {}
    operations: dict[str, int] = {}
    masked: dict[str, bool] = {}
    for name, (keywords, reads) in VARIANTS.items():
        spec = attngen.define(name="variant", dtype="bf16", head_dim=128, **keywords)
        inputs = captured(reads)
        calls[name] = partial(attngen.compile(spec, kernel="fused", device="cuda", captures=inputs), q, k, v)
        operations[name] = 4 * 128 * allowed_pairs(spec, q, k, inputs)
        masked[name] = spec.mask is not None
    clocks: dict[str, list[int]] = {name: [] for name in calls}

    def timed(name: str) -> float:
        ms, clock = stretch(calls[name])
        clocks[name].append(clock)
        return ms

    found = in_rounds(calls, rounds, timed)
    ms = found.medians()
    for name in calls:
        plain = "causal" if masked[name] else "full"
        yield {
            "case": name,
            "ms": ms[name],
            "tflops": operations[name] / (ms[name] * 1e9),
            "clock": median(clocks[name][-rounds:]),
            "plain_clock": median(clocks[plain][-rounds:]),
            "share": found.ratio(name, plain) * operations[name] / operations[plain],
        }


def stretch(call: Callable[[], object]) -> tuple[float, int]:
    """Milliseconds of a call, the median of a stretch's second half, and the multiprocessors' clock in it, MHz."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    calls = max(4, calls_in(STRETCH, start.elapsed_time(end)))
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    asked: subprocess.Popen[str] | None = None
    for n in range(calls):
        events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        events[-1][0].record()
        call()
        events[-1][1].record()
        if n == calls // 2:  # the GPU is some hundred calls behind
            asked = subprocess.Popen(CLOCK, stdout=subprocess.PIPE, text=True)
    assert asked is not None
    clock, _ = asked.communicate()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in events[calls // 2 + 1 :]), int(clock)


def table(rows: list[Row]) -> str:
    lines = [
        (r["case"], f"{r['tflops']:.0f}", f"{r['share']:.0%}", f"{r['clock']:.0f}", f"{r['plain_clock']:.0f}") for r in rows
    ]
    return markdown(("B2 H16 S8192 D128 bf16", "TFLOP/s", "of its own plain rate", "MHz", "MHz of the plain kernel"), lines)
