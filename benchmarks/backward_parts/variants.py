"""The variants that FlexAttention is used for, beside its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from cell import Row
from portable_parts.variants import VARIANTS
from portable_parts.variants import captured as captured_tensor
from words import Mark, least, markdown, worst

import attngen
from attngen.bench.measure import measure_bursts
from attngen.bench.peers import flex_peer, those_that_run
from attngen.reference.torch_oracle import allowed_pairs
from attngen.torch import Attention
from backward_parts import backwards, leaves

Variant = tuple[dict[str, Any], str]  # keywords of attngen.define, the captured tensor
GOALS = {
    "full": 1.45,
    "causal": 1.5,
    "ALiBi": 1.4,
    "soft-cap 20": 2.0,
    "window 1024": 1.4,
    "documents of 1024": 1.4,
    "prefix 1024": 1.4,
    "relative bias": 1.4,
}


def rows(rounds: int) -> Iterator[Row]:
    for name in GOALS:
        yield beside_flex(name, VARIANTS[name], rounds)


def beside_flex(name: str, variant: Variant, rounds: int, kernel: str | None = None, with_captured: bool = False) -> Row:
    """Milliseconds, TFLOP/s and ratio for B2 H16 S8192 D128 bf16; `with_captured`: the captured tensor has a gradient too."""
    keywords, reads = variant
    spec = attngen.define(name="variant", dtype="bf16", head_dim=128, **keywords)
    q, k, v = leaves([torch.randn(2, 16, 8192, 128, device="cuda").bfloat16() for _ in range(3)])
    inputs = captured_tensor(reads)
    if with_captured:
        inputs = dict(zip(inputs, leaves(list(inputs.values())), strict=True))
    wanted: Sequence[torch.Tensor] = (q, k, v, *(inputs.values() if with_captured else ()))
    with torch.enable_grad():
        ours = partial(Attention(spec, mode=kernel or "auto", deterministic=False), q, k, v, **inputs)
        calls = backwards({"attngen": ours, **flex_peer(spec, q, k, v, inputs, {}, print)}, wanted)
    found = measure_bursts(those_that_run(calls), rounds)
    ms = found.medians()
    pairs = allowed_pairs(spec, q, k, inputs)
    return {
        "case": name,
        "ms": ms,
        "tflops": {side: 10 * 128 * pairs / (t * 1e9) for side, t in ms.items()},
        "ratio": found.ratio("attngen", "FlexAttention") if "FlexAttention" in ms else None,
    }


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        t = r["tflops"]
        flex, ratio = (f"{t['FlexAttention']:.0f}", f"{r['ratio']:.2f}") if r["ratio"] else ("-", "-")
        lines.append((r["case"], f"{t['attngen']:.0f}", flex, ratio, f"{GOALS.get(r['case'], 1.5):.2f}"))
    titles = ("TFLOP/s, B2 H16 S8192 D128 bf16", "attngen", "FlexAttention", "ratio", "goal")
    return f"{markdown(titles, lines)}\n\nLeast: {least([r for r in rows if r['ratio']], lambda r: r['ratio'])}."


def marks(rows: list[Row]) -> list[Mark]:
    return [worst(f"{r['case']} over FlexAttention", [r], lambda r: r["ratio"], GOALS[r["case"]]) for r in rows if r["ratio"]]
