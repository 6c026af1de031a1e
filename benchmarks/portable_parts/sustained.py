"""The same variants, each by itself for most of a second: at its power limit a GPU selects the clock for each kernel's own
work, whereas rounds of a few milliseconds give all kernels the same clock. These are the rates of long runs of one variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from cell import Row, sustained
from words import markdown

import attngen
from attngen.bench.measure import in_rounds
from attngen.reference.torch_oracle import allowed_pairs
from portable_parts.variants import VARIANTS, captured, plain

ROUNDS = 5  # stretches per variant, each of many calls


def rows(rounds: int) -> Iterator[Row]:
    """Stretches of all variants in random order, ROUNDS times, whatever `rounds` says; L2 is not flushed: the tensors are
    five times as large."""
    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda").bfloat16() for _ in range(3))
    calls: dict[str, Callable[[], object]] = {}
    operations: dict[str, int] = {}
    for name, (keywords, reads) in VARIANTS.items():
        spec = attngen.define(name="variant", dtype="bf16", head_dim=128, **keywords)
        inputs = captured(reads)
        calls[name] = partial(attngen.compile(spec, kernel="fused", device="cuda", captures=inputs), q, k, v)
        operations[name] = 4 * 128 * allowed_pairs(spec, q, k, inputs)
    found = in_rounds(calls, ROUNDS, lambda name: sustained(calls[name]))
    ms = found.medians()
    for name in calls:
        yield {
            "case": name,
            "ms": ms[name],
            "tflops": operations[name] / (ms[name] * 1e9),
            "share": found.ratio(name, plain(name)) * operations[name] / operations[plain(name)],
        }


def table(rows: list[Row]) -> str:
    lines = [(r["case"], f"{r['tflops']:.0f}", f"{r['share']:.0%}") for r in rows]
    titles = ("TFLOP/s, B2 H16 S8192 D128 bf16", "attngen", "of its own plain rate")
    return f"{markdown(titles, lines)}\n\nMedians of {ROUNDS} stretches."
