"""Heads of more than 256 columns, by wgmma and by mma.sync, beside torch's backends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cell import Cell, Row, rates
from words import markdown

import attngen
from attngen.bench.measure import measure_bursts
from attngen.bench.peers import torch_peers
from attngen.reference.torch_oracle import torch_attention

PEERS = ("torch efficient", "torch math")
KERNELS = ("hopper", "fused")
FULL, CAUSAL, TIMES = 600.0, 520.0, 2.0  # goals: TFLOP/s of hopper; fused, times torch's efficient backend
CELLS = [
    Cell("bf16", 512, mask, batch, 8, length, length, kv_heads)
    for mask in (None, "causal")
    for batch, length, kv_heads in ((2, 4096, None), (2, 4096, 1), (1, 16384, 4))
] + [Cell("bf16", 320, "causal", 2, 8, 4096, 4096), Cell("fp16", 512, None, 2, 8, 4096, 4096)]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        tensors = cell.randn()
        calls = {k: partial(attngen.compile(cell.spec, kernel=k, device="cuda"), *tensors) for k in KERNELS}
        calls |= torch_peers(cell.spec, *tensors, only=PEERS)
        first = [t[:1, :1] for t in tensors]
        exact, _ = torch_attention(cell.spec, *first)
        errors = {name: float((call()[:1, :1].double() - exact).abs().max()) for name, call in calls.items()}
        ms = measure_bursts(calls, rounds).medians()
        yield {"case": cell.title, "tflops": rates(cell.operations(tensors), ms), "errors": errors}


def table(rows: list[Row]) -> str:
    sides = [s for s in (*KERNELS, *PEERS) if any(s in r["tflops"] for r in rows)]
    lines = [
        (r["case"], *(f"{r['tflops'][s]:.0f} ({r['errors'][s]:.0e})" if s in r["tflops"] else "-" for s in sides)) for r in rows
    ]
    goal = f"hopper {FULL:.0f} full and {CAUSAL:.0f} causal, fused {TIMES:.0f} times torch efficient, at S4096"
    errors = "In parentheses: the largest error against float64, of the first head."
    return f"{markdown(('TFLOP/s', *sides), lines)}\n\n{errors} Goal: {goal}."
