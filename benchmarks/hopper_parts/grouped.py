"""Grouped heads, and queries and keys of different number, beside as much work with equal heads and lengths."""

from __future__ import annotations

from collections.abc import Iterator

from cell import CUDNN, Cell, Row, beside_cudnn, kernel, rates
from words import least, markdown

from attngen.bench.measure import measure_bursts

ALIGNED = "causal_bottom_right"


def _cell(mask: str | None, batch: int, q_len: int, kv_len: int, heads: int = 16, kv_heads: int | None = None) -> Cell:
    return Cell("bf16", 128, mask, batch, heads, q_len, kv_len, kv_heads)


# As many kept pairs on both sides, but for 1024 x 8192 aligned at the end, which keeps 6% fewer.
PAIRS: list[tuple[Cell, Cell]] = [
    (_cell(None, 2, 4096, 4096, 32, 8), _cell(None, 2, 4096, 4096, 32)),
    (_cell("causal", 2, 4096, 4096, 32, 8), _cell("causal", 2, 4096, 4096, 32)),
    (_cell(None, 4, 1024, 8192), _cell(None, 2, 4096, 4096)),
    (_cell(None, 4, 8192, 1024), _cell(None, 2, 4096, 4096)),
    (_cell(ALIGNED, 4, 1024, 8192), _cell("causal", 4, 4096, 4096)),
    (_cell(ALIGNED, 16, 8192, 1024), _cell("causal", 16, 1024, 1024)),
]


def rows(rounds: int) -> Iterator[Row]:
    for cell, equal in PAIRS:
        tensors, equal_tensors = cell.randn(), equal.randn()
        found = measure_bursts({**beside_cudnn(cell, tensors), "equal": kernel(equal, equal_tensors)}, rounds)
        ms = found.medians()
        work, equal_work = cell.operations(tensors), equal.operations(equal_tensors)
        tflops = rates(work, ms) | rates(equal_work, {"equal": ms["equal"]})
        share = found.ratio("attngen", "equal") * work / equal_work
        yield {"case": cell.title, "equal": equal.title, "ms": ms, "tflops": tflops, "share": share}


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        t = r["tflops"]
        theirs = f"{t[CUDNN]:.0f}" if CUDNN in t else "-"
        lines.append((r["case"], f"{t['attngen']:.0f}", theirs, r["equal"], f"{t['equal']:.0f}", f"{r['share']:.1%}"))
    titles = ("TFLOP/s", "attngen", "cuDNN", "equal heads and lengths", "attngen", "share")
    return f"{markdown(titles, lines)}\n\nMeasured: the least share {least(rows, lambda r: r['share'])}."
