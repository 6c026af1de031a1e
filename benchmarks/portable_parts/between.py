"""Head sizes between the powers of two, beside what their share of D = 128's work predicts."""

from __future__ import annotations

from collections.abc import Iterator

from cell import Row, square
from words import markdown

from portable_parts.plain import FLASH, beside_flash

KNOWN = 128
SIZES = (KNOWN, 80, 96, 160, 192)
CELLS = [square("bf16", d, m, 4096) for d in SIZES for m in (None, "causal")]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        work = {"mask": cell.mask, "head_dim": cell.head_dim, "heads": cell.heads}
        yield beside_flash(cell, rounds) | work


def table(rows: list[Row]) -> str:
    """Milliseconds beside those of D = 128 times the share of its work."""
    known = {r["mask"]: r for r in rows if r["head_dim"] == KNOWN}
    lines = []
    for r in rows:
        base, ours = known[r["mask"]], r["ms"]["attngen"]
        share = r["head_dim"] * r["heads"] / (base["head_dim"] * base["heads"])
        predicted = base["ms"]["attngen"] * share
        case = f"D{r['head_dim']} {r['mask'] or 'full'}, {r['heads']} heads"
        lines.append((case, f"{ours:.3f}", f"{predicted:.3f}", f"{ours / predicted:.2f}", f"{r['ms'][FLASH]:.3f}"))
    return markdown(("S4096, bf16", "ms", f"predicted from D{KNOWN}", "ratio", "FlashAttention-2, ms"), lines)
