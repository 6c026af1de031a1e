"""Plain attention beside torch's FlashAttention-2 and cuDNN backends: rates, and the largest errors against float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cell import CUDNN, Cell, Row, rates, square
from words import geometric_mean, least, markdown

import attngen
from attngen.bench.measure import measure
from attngen.bench.peers import torch_peers
from attngen.reference.torch_oracle import torch_attention

FLASH = "torch flash"
CELLS = [
    square(t, d, m, s) for t in ("bf16", "fp16") for d in (64, 128, 256) for m in (None, "causal") for s in (1024, 4096, 16384)
]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        yield beside_flash(cell, rounds)


def beside_flash(cell: Cell, rounds: int) -> Row:
    """Milliseconds, TFLOP/s and error of each candidate; a call at a time."""
    tensors = cell.randn()
    compiled = attngen.compile(cell.spec, kernel="fused", device="cuda")
    calls = {"attngen": partial(compiled, *tensors), **torch_peers(cell.spec, *tensors, only=(FLASH, CUDNN))}
    one = (slice(0, 1), slice(0, 2))  # errors of one batch's first two heads
    truth, _ = torch_attention(cell.spec, *(t[one] for t in tensors))
    errors = {name: float((call()[one].double() - truth).abs().max()) for name, call in calls.items()}
    ms = {name: timing.median for name, timing in measure(calls, rounds).items()}
    return {
        "case": cell.title,
        "schedule": compiled.plan.schedule.name,
        "ms": ms,
        "tflops": rates(cell.operations(tensors), ms),
        "ratio": ms[FLASH] / ms["attngen"],
        "errors": errors,
    }


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        t, e = r["tflops"], r["errors"]
        cudnn = f"{t[CUDNN]:.0f}" if CUDNN in t else "-"
        errors = (f"{e['attngen']:.1e}", f"{e[FLASH]:.1e}")
        lines.append((r["case"], f"{t['attngen']:.0f}", f"{t[FLASH]:.0f}", f"{r['ratio']:.2f}", cudnn, *errors))
    text = markdown(("TFLOP/s", "attngen", "FlashAttention-2", "ratio", "cuDNN", "error", "of FlashAttention-2"), lines)
    mean = geometric_mean([r["ratio"] for r in rows])
    seen = f"geometric mean of the ratios {mean:.3f}, least {least(rows, lambda r: r['ratio'])}"
    return f"{text}\n\nSchedule {rows[0]['schedule']}. Measured: {seen}."
