"""Head sizes between the powers of two: the rates of their backward beside that of D = 128."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from cell import Row, square
from words import Mark, least, markdown, worst

from attngen.bench.measure import measure_bursts
from backward_parts import beside_torch, operations

SHARE, KNOWN = 0.90, 128
SIZES = (80, 96, 160, 192)


def rows(rounds: int) -> Iterator[Row]:
    """All sizes of a mask in the same rounds."""
    for mask in (None, "causal"):
        cells = {d: square("bf16", d, mask, 4096) for d in (KNOWN, *SIZES)}
        tensors = {d: cell.randn() for d, cell in cells.items()}
        calls = {str(d): beside_torch(cell, tensors[d], None, [])["attngen"] for d, cell in cells.items()}
        found = measure_bursts(calls, rounds)
        work = {d: operations(cell, tensors[d]) for d, cell in cells.items()}
        tflops = [{d: work[d] / (one[str(d)] * 1e9) for d in cells} for one in found.each]
        for d in SIZES:
            rate, share = median(one[d] for one in tflops), median(one[d] / one[KNOWN] for one in tflops)
            yield {"case": cells[d].title, "tflops": rate, "share": share}


def table(rows: list[Row]) -> str:
    lines = ((r["case"], f"{r['tflops']:.0f}", f"{r['share']:.1%}") for r in rows)
    text = markdown(("TFLOP/s", "attngen", f"of D{KNOWN}"), lines)
    seen = f"the least share {least(rows, lambda r: r['share'])}"
    return f"{text}\n\nGoal: at least {SHARE:.0%} of the rate of D{KNOWN}, for D80 and D96. Measured: {seen}."


def marks(rows: list[Row]) -> list[Mark]:
    wanted = [r for r in rows if "D80 " in r["case"] or "D96 " in r["case"]]
    return [worst(f"D80 and D96, of the rate of D{KNOWN}", wanted, lambda r: r["share"], SHARE)]
