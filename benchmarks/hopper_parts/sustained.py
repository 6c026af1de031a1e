"""Calls without pause for half a second, with cuDNN before and after: the rates at the clocks of sustained work."""

from __future__ import annotations

from collections.abc import Iterator

from cell import CUDNN, Cell, Row, beside_cudnn, rates, square, sustained
from words import geometric_mean, least, markdown

EACH = 1.08
BEFORE, AFTER = "cuDNN before", "cuDNN after"
CELLS: list[Cell] = [square("bf16", d, m, s) for d, s in ((128, 16384), (64, 4096), (256, 4096)) for m in (None, "causal")]


def rows(rounds: int) -> Iterator[Row]:
    """One measurement a cell, whatever `rounds` says: half a second is many calls."""
    for cell in CELLS:
        tensors = cell.randn()
        calls = beside_cudnn(cell, tensors)
        ms = {name: sustained(calls[call]) for name, call in ((BEFORE, CUDNN), ("attngen", "attngen"), (AFTER, CUDNN))}
        yield {"case": cell.title, "ms": ms, "tflops": rates(cell.operations(tensors), ms), "ratio": ratio(ms)}


def ratio(milliseconds: dict[str, float]) -> float:
    """How many times faster than the mean of cuDNN's two."""
    return (milliseconds[BEFORE] + milliseconds[AFTER]) / 2 / milliseconds["attngen"]


def table(rows: list[Row]) -> str:
    names = (BEFORE, "attngen", AFTER)
    lines = ([r["case"], *(f"{r['tflops'][name]:.0f}" for name in names), f"{r['ratio']:.3f}"] for r in rows)
    mean = geometric_mean([r["ratio"] for r in rows])
    seen = f"geometric mean {mean:.3f}, least {least(rows, lambda r: r['ratio'])}"
    return f"{markdown(('TFLOP/s', *names, 'ratio'), lines)}\n\nGoal: each ratio {EACH:.2f}. Measured: {seen}."
