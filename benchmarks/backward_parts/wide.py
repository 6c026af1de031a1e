"""Heads of more than 256 columns, beside torch's backends that have their gradients."""

from __future__ import annotations

from collections.abc import Iterator

from cell import Cell, Row, rates
from words import markdown

from attngen.bench.measure import measure_bursts
from backward_parts import beside_torch, operations

PEERS = ("torch efficient", "torch math")
FULL, CAUSAL = 300.0, 270.0  # goals, in TFLOP/s
CELLS = [
    Cell("bf16", 512, mask, batch, 8, length, length, kv_heads)
    for mask in (None, "causal")
    for batch, length, kv_heads in ((2, 4096, None), (2, 4096, 1))
] + [Cell("bf16", 320, "causal", 2, 8, 4096, 4096), Cell("fp16", 512, None, 2, 8, 4096, 4096)]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        tensors = cell.randn()
        ms = measure_bursts(beside_torch(cell, tensors, "hopper", PEERS), rounds).medians()
        yield {"case": cell.title, "tflops": rates(operations(cell, tensors), ms)}


def table(rows: list[Row]) -> str:
    sides = [s for s in ("attngen", *PEERS) if any(s in r["tflops"] for r in rows)]
    lines = [(r["case"], *(f"{r['tflops'][s]:.0f}" if s in r["tflops"] else "-" for s in sides)) for r in rows]
    goal = f"{FULL:.0f} full and {CAUSAL:.0f} causal, at D512 and S4096"
    return f"{markdown(('TFLOP/s', *sides), lines)}\n\nGoal: {goal}."
