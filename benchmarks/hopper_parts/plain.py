"""Plain attention beside cuDNN, and FlashAttention where it is installed, the L2 cache flushed before each call."""

from __future__ import annotations

from collections.abc import Iterator

from cell import CUDNN, Cell, Row, beside_cudnn, flash_ratios, rates, square
from words import geometric_mean, least, with_flash

from attngen.bench.measure import measure_bursts

MEAN, EACH = 1.20, 1.07
HEAD_DIMS = (64, 128, 256)
MASKS = (None, "causal")
CELLS: list[Cell] = [square("bf16", d, m, s) for d in HEAD_DIMS for m in MASKS for s in (1024, 4096, 16384)]
CELLS += [square("fp16", d, m, 4096) for d in HEAD_DIMS for m in MASKS]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        tensors = cell.randn()
        found = measure_bursts(beside_cudnn(cell, tensors), rounds)
        ms = found.medians()
        tflops = rates(cell.operations(tensors), ms)
        ratio = found.ratio("attngen", CUDNN)
        yield {"case": cell.title, "ms": ms, "tflops": tflops, "ratio": ratio, "flash": flash_ratios(found)}


def table(rows: list[Row]) -> str:
    lines = (
        (r["case"], f"{r['tflops']['attngen']:.0f}", f"{r['tflops'][CUDNN]:.0f}", f"{r['ratio']:.3f}")
        for r in rows
    )  # fmt: skip
    ends = []
    for dtype in ("bf16", "fp16"):
        chosen = [r for r in rows if r["case"].startswith(dtype)]
        mean = geometric_mean([r["ratio"] for r in chosen])
        ends.append(f"{dtype} geometric mean {mean:.3f}, least {least(chosen, lambda r: r['ratio'])}")
    goal = f"Goal: geometric mean of the ratios {MEAN:.2f}, each {EACH:.2f}. Measured: {'; '.join(ends)}."
    return f"{with_flash(('TFLOP/s', 'attngen', 'cuDNN', 'ratio'), lines, rows)}\n\n{goal}"
