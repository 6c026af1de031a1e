"""Plain attention beside cuDNN's backward, and beside FlashAttention's where it is installed."""

from __future__ import annotations

from collections.abc import Iterator

from cell import CUDNN, Cell, Row, flash_ratios, rates, square
from words import Mark, geometric_mean, least, with_flash, worst

from attngen.bench.measure import measure_bursts
from backward_parts import beside_torch, operations

MEAN, EACH = 1.25, 1.10
CELLS: list[Cell] = [
    square(t, d, m, s) for t in ("bf16", "fp16") for d in (64, 128, 256) for m in (None, "causal") for s in (1024, 4096, 16384)
]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        yield beside(cell, rounds, None, CUDNN, flash=True)


def beside(cell: Cell, rounds: int, kernel: str | None, peer: str, deterministic: bool = False, flash: bool = False) -> Row:
    """Milliseconds and TFLOP/s of both, and their ratio; with `flash`, FlashAttention's packages too."""
    tensors = cell.randn()
    found = measure_bursts(beside_torch(cell, tensors, kernel, [peer], deterministic, flash), rounds)
    ms = found.medians()
    tflops, ratio = rates(operations(cell, tensors), ms), found.ratio("attngen", peer)
    return {"case": cell.title, "ms": ms, "tflops": tflops, "ratio": ratio, "peer": peer, "flash": flash_ratios(found)}


def table(rows: list[Row]) -> str:
    return table_beside(rows, f"geometric mean of the ratios {MEAN:.2f}, each {EACH:.2f}")


def table_beside(rows: list[Row], goal: str) -> str:
    lines = (
        (r["case"], f"{r['tflops']['attngen']:.0f}", f"{r['tflops'][r['peer']]:.0f}", f"{r['ratio']:.3f}")
        for r in rows
    )  # fmt: skip
    text = with_flash(("TFLOP/s", "attngen", rows[0]["peer"], "ratio"), lines, rows)
    mean = geometric_mean([r["ratio"] for r in rows])
    seen = f"geometric mean {mean:.3f}, least {least(rows, lambda r: r['ratio'])}"
    return f"{text}\n\nGoal: {goal}. Measured: {seen}."


def marks(rows: list[Row]) -> list[Mark]:
    mean = geometric_mean([r["ratio"] for r in rows])
    return [
        Mark("plain over cuDNN, geometric mean", MEAN, mean, ""),
        worst("plain over cuDNN", rows, lambda r: r["ratio"], EACH),
    ]
