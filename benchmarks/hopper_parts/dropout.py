"""Dropout of a tenth of the weights beside the same attention without it, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from backward_parts import backwards, leaves, operations
from cell import Cell, Row, rates, square
from words import geometric_mean, least, markdown

from attngen.bench.measure import measure_bursts
from attngen.language import define
from attngen.spec.attention import AttentionSpec
from attngen.torch import Attention

P = 0.1
EACH = 0.85  # goal: share of the forward's speed without dropout
CELLS: list[Cell] = [square("bf16", d, m, s) for d in (64, 128) for m in (None, "causal") for s in (1024, 4096)]
CELLS += [square("bf16", 128, "causal", 16384)]


def dropped(cell: Cell) -> AttentionSpec:
    """The attention of `cell` with dropout."""
    with_state = define(dropout=P)
    return replace(cell.spec, dropout=with_state.dropout, inputs=with_state.inputs)


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        tensors = cell.randn()
        state = torch.tensor([1, 2], device="cuda")
        q, k, v = leaves(tensors)
        calls = {
            "with": partial(Attention(dropped(cell), mode="hopper"), q, k, v, rng_state=state),
            "without": partial(Attention(cell.spec, mode="hopper"), q, k, v),
        }
        found = {"forward": measure_bursts(calls, rounds)}
        with torch.enable_grad():
            found["backward"] = measure_bursts(backwards(calls, (q, k, v)), rounds)
        work = {"forward": cell.operations(tensors), "backward": operations(cell, tensors)}
        yield {
            "case": cell.title,
            "tflops": {way: rates(work[way], one.medians()) for way, one in found.items()},
            "share": {way: one.ratio("with", "without") for way, one in found.items()},
        }


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        cells = [f"{r['tflops'][way][side]:.0f}" for way in ("forward", "backward") for side in ("with", "without")]
        shares = [f"{r['share'][way]:.1%}" for way in ("forward", "backward")]
        lines.append((r["case"], *cells[:2], shares[0], *cells[2:], shares[1]))
    titles = ("TFLOP/s", "forward", "without", "share", "backward", "without", "share")
    seen = f"least share of the forward {least(rows, lambda r: r['share']['forward'])}"
    means = (f"{way} {geometric_mean([r['share'][way] for r in rows]):.3f}" for way in ("forward", "backward"))
    return f"{markdown(titles, lines)}\n\nGoal: each forward {EACH:.0%}. Measured: {seen}; geometric means: {', '.join(means)}."
