"""Head sizes between the powers of two, beside what their neighbours' rates predict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median

from cell import Cell, Row, kernel, square
from words import least, markdown

from attngen.bench.measure import measure_bursts

SHARE = 0.90
KNOWN = (64, 128, 256)
BETWEEN: tuple[tuple[int, int | None], ...] = ((80, None), (96, None), (160, None), (192, None), (192, 128))


def rows(rounds: int) -> Iterator[Row]:
    """All sizes of a mask in the same rounds."""
    for mask in (None, "causal"):
        known = {d: square("bf16", d, mask, 4096) for d in KNOWN}
        between = [square("bf16", d, mask, 4096, dv) for d, dv in BETWEEN]
        cells = [*known.values(), *between]
        tensors = {c.title: c.randn() for c in cells}
        found = measure_bursts({c.title: kernel(c, tensors[c.title]) for c in cells}, rounds)
        work = {c.title: c.operations(tensors[c.title]) for c in cells}
        tflops = [{title: work[title] / (ms * 1e9) for title, ms in one.items()} for one in found.each]
        for cell in between:
            measured = [one[cell.title] for one in tflops]
            predictions = [predicted(mean_size(cell), {d: one[c.title] for d, c in known.items()}) for one in tflops]
            share = median(m / p for m, p in zip(measured, predictions, strict=True))
            yield {"case": cell.title, "tflops": median(measured), "predicted": median(predictions), "share": share}


def mean_size(cell: Cell) -> float:
    """What the operations of a pair depend on: (head_dim + head_dim_v) / 2."""
    return (cell.head_dim + (cell.head_dim_v or cell.head_dim)) / 2


def predicted(size: float, known: Mapping[int, float]) -> float:
    """The rate at `size`, on the straight line between its neighbours in `known`."""
    for low, high in pairwise(sorted(known)):
        if low <= size <= high:
            return known[low] + (known[high] - known[low]) * (size - low) / (high - low)
    raise ValueError(f"{size} does not lie between the known sizes")


def table(rows: list[Row]) -> str:
    lines = ((r["case"], f"{r['tflops']:.0f}", f"{r['predicted']:.0f}", f"{r['share']:.1%}") for r in rows)
    text = markdown(("TFLOP/s", "attngen", "predicted", "share"), lines)
    seen = f"the least share {least(rows, lambda r: r['share'])}"
    return f"{text}\n\nGoal: at least {SHARE:.0%} of what is predicted. Measured: {seen}."
