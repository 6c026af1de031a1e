"""Formatting of tables, and of goals and measured figures below them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cell import Row

from attngen.bench.peers import FLASH_PACKAGES


def markdown(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *lines))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def with_flash(titles: Sequence[str], lines: Iterable[Sequence[str]], rows: Sequence[Row], digits: int = 3) -> str:
    """A table whose last column is the ratio to cuDNN; before it, and after it as the ratio to the fastest, FlashAttention's
    packages where they were measured."""
    names = [n for n in FLASH_PACKAGES if any(n in r.get("flash", {}) for r in rows)]
    if not names:
        return markdown(titles, lines)
    wider = []
    for r, (*cells, ratio) in zip(rows, lines, strict=True):
        rates = (f"{r['tflops'][n]:.0f}" if n in r["flash"] else "-" for n in names)
        wider.append((*cells, *rates, ratio, f"{ratio_to_fastest(r):.{digits}f}"))
    return markdown((*titles[:-1], *names, titles[-1], "to the fastest"), wider)


def ratio_to_fastest(row: Row) -> float:
    return float(min(row["ratio"], *row["flash"].values())) if row.get("flash") else float(row["ratio"])


@dataclass(frozen=True, slots=True)
class Mark:
    """A goal of a benchmark: what was measured, where it was worst, and whether that is enough."""

    name: str
    goal: float
    measured: float
    at: str  # the cell that is furthest from the goal; empty for a mean
    at_most: bool = False  # the goal is an upper limit

    @property
    def is_met(self) -> bool:
        return self.measured <= self.goal if self.at_most else self.measured >= self.goal


def worst(name: str, rows: Iterable[Row], of: Callable[[Row], float], goal: float, at_most: bool = False) -> Mark:
    """The mark that each row must reach, as its worst row reaches it."""
    row = (max if at_most else min)(rows, key=of)
    return Mark(name, goal, of(row), row["case"], at_most)


def marks_table(marks: Iterable[Mark]) -> str:
    goals = {True: "at most", False: "at least"}
    lines = (
        (m.name, f"{goals[m.at_most]} {m.goal:.2f}", f"{m.measured:.3f}", m.at, "yes" if m.is_met else "no") for m in marks
    )
    return markdown(("mark", "goal", "measured", "worst cell", "met"), lines)


def least(rows: Iterable[Row], of: Callable[[Row], float]) -> str:
    """`0.977 (bf16 D256 full S1024)`."""
    lowest = min(rows, key=of)
    return f"{of(lowest):.3f} ({lowest['case']})"


def most(rows: Iterable[Row], of: Callable[[Row], float]) -> str:
    highest = max(rows, key=of)
    return f"{of(highest):.3f} ({highest['case']})"
