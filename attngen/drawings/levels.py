"""Bars of numbers by group: bytes by level of memory, and rates of measured tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attngen.drawings.picture import Picture, number, width_of

ROOM, BAR, GAP = 520.0, 17.0, 12.0
COLOURS = ("grey", "blue", "teal", "amber", "violet", "green", "red")


@dataclass(frozen=True, slots=True)
class Bars:
    """Numbers by group and series: `values[group][series]`. With `logarithmic`, a step of the axis is a factor of ten."""

    values: Mapping[str, Mapping[str, float]]
    unit: str
    logarithmic: bool = False
    colours: Sequence[str] = COLOURS

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.values.values() for name in row))

    def share(self, value: float) -> float:
        """How long a bar is, of the room."""
        every = [v for row in self.values.values() for v in row.values() if v > 0]
        most = max(every, default=1.0)
        if not self.logarithmic:
            return value / most
        low, high = math.floor(math.log10(min(every, default=1.0))) - 0.3, math.log10(most)
        return (math.log10(value) - low) / max(high - low, 1.0) if value > 0 else 0.0


def amount(value: float, unit: str) -> str:
    """A number with its unit: bytes as kB, MB."""
    if unit != "bytes":
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    for factor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value:.0f} B"


def bars_picture(title: str, says: str, bars: Bars) -> Picture:
    """Groups from top to bottom, each with a bar for each series."""
    drawn = Picture(title, says)
    left = 10.0 + max(map(width_of, bars.values), default=0.0)
    series, y = bars.series, 24.0
    colour = {name: bars.colours[i % len(bars.colours)] for i, name in enumerate(series)}
    if len(series) > 1:
        drawn.legend(left, 12.0, *((colour[name], name) for name in series))
    else:
        y = 4.0
    for group, row in bars.values.items():
        drawn.text(left - 8.0, y + len(row) * BAR / 2 + 3.0, group, "", "end")
        for name, value in row.items():
            wide = bars.share(value) * ROOM
            drawn.rect(left, y, max(wide, 1.0), BAR - 2.0, colour[name], f"{group}, {name}: {value:,.6g} {bars.unit}")
            drawn.text(left + wide + 5.0, y + 12.0, amount(value, bars.unit), "small")
            y += BAR
        y += GAP
    drawn.path(f"M{number(left)} 18V{number(y - GAP + 4)}", "rule")
    drawn.text(left, y + 4.0, bars.unit + (", on a logarithmic axis" if bars.logarithmic else ""), "quiet")
    return drawn
