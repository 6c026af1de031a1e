"""Bars by lane over time: the pipeline of copies and products of a traced run."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.drawings.picture import Picture, width_of

COPY, PRODUCT, SOFTMAX = "copy", "product", "softmax"
ROOM, LANE = 760.0, 30.0


@dataclass(frozen=True, slots=True)
class Bar:
    """Work from `start` on for `length` units of time. `kind` is one of COPY, PRODUCT, SOFTMAX."""

    start: float
    length: float
    label: str
    kind: str

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bars by lane, the lanes from top to bottom, and what they show in a sentence."""

    lanes: dict[str, tuple[Bar, ...]]
    says: str

    @property
    def end(self) -> float:
        return max(bar.end for bars in self.lanes.values() for bar in bars)


def timeline_picture(found: Timeline, title: str) -> Picture:
    drawn = Picture(title, found.says)
    left = 10.0 + max(map(width_of, found.lanes))
    unit = ROOM / found.end
    for i, (lane, bars) in enumerate(found.lanes.items()):
        y = i * LANE
        drawn.text(left - 8.0, y + 16.0, lane, "", "end")
        drawn.line(left, y + 25.0, left + ROOM, y + 25.0)
        for bar in bars:
            x, wide = left + bar.start * unit, bar.length * unit
            drawn.rect(x, y, wide - 1.0, 23.0, bar.kind, bar.label)
            if width_of(bar.label, 6.0) < wide + 4.0:
                drawn.text(x + wide / 2, y + 15.5, bar.label, "on-bar", "middle")
    y = len(found.lanes) * LANE + 12.0
    kinds = {bar.kind for bars in found.lanes.values() for bar in bars}
    words = ((COPY, "copy of a tile"), (PRODUCT, "product on the tensor cores"), (SOFTMAX, "softmax by threads"))
    drawn.legend(left, y, *(entry for entry in words if entry[0] in kinds))
    drawn.text(left + ROOM, y, "time →", "quiet", "end")
    return drawn
