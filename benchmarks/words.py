"""Formatting of tables, and of goals and measured figures below them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from cell import Row


def markdown(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *lines))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def least(rows: Iterable[Row], of: Callable[[Row], float]) -> str:
    """`0.977 (bf16 D256 full S1024)`."""
    lowest = min(rows, key=of)
    return f"{of(lowest):.3f} ({lowest['case']})"


def most(rows: Iterable[Row], of: Callable[[Row], float]) -> str:
    highest = max(rows, key=of)
    return f"{of(highest):.3f} ({highest['case']})"
