"""Query heads that share keys and values, as in Llama 3, beside cuDNN's backward."""

from __future__ import annotations

from collections.abc import Iterator

from cell import CUDNN, Cell, Row
from words import Mark, geometric_mean, worst

from backward_parts.plain import EACH, MEAN, beside, table_beside

SHAPES = ((1, 4096), (4, 4096), (2, 2048), (1, 16384))  # batch, length
CELLS = [Cell("bf16", 128, m, batch, 32, s, s, kv_heads=8) for m in ("causal", None) for batch, s in SHAPES]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        yield beside(cell, rounds, None, CUDNN, flash=True)


def table(rows: list[Row]) -> str:
    return table_beside(rows, f"as without groups, geometric mean {MEAN:.2f}, each {EACH:.2f}")


def marks(rows: list[Row]) -> list[Mark]:
    ratios = [r["ratio"] for r in rows]
    mean = Mark("grouped heads over cuDNN, geometric mean", MEAN, geometric_mean(ratios), "")
    return [mean, worst("grouped heads over cuDNN", rows, lambda r: r["ratio"], EACH)]
