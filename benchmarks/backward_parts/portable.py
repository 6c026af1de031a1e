"""The portable kernels' backward: 16-bit beside torch's FlashAttention-2, fp32 beside torch's memory-efficient backend."""

from __future__ import annotations

from collections.abc import Iterator

from cell import Cell, Row, square

from backward_parts.plain import beside, table_beside

FLASH, EFFICIENT = "torch flash", "torch efficient"
CELLS: list[Cell] = [square("bf16", d, m, s) for d in (64, 128, 256) for m in (None, "causal") for s in (1024, 4096, 16384)]
FP32: list[Cell] = [square("fp32", d, m, 2048) for d in (64, 128) for m in (None, "causal")]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        yield beside(cell, rounds, "fused", FLASH)
    for cell in FP32:
        yield beside(cell, rounds, "fused", EFFICIENT)


def table(rows: list[Row]) -> str:
    flash, efficient = ([r for r in rows if r["peer"] == peer] for peer in (FLASH, EFFICIENT))
    return "\n\n".join(
        (table_beside(flash, "geometric mean of the ratios 1.0, each 0.9"), table_beside(efficient, "each ratio 1.2"))
    )
