"""Work tiles over multiprocessors: which blocks run where and when, if a block takes as long as it visits tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from attngen.drawings.picture import Picture, number

ROOM, LANE = 720.0, 17.0


@dataclass(frozen=True, slots=True)
class Work:
    """A block of rows of a head, and how many tiles of keys it visits."""

    q_block: int
    head: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A work tile on a multiprocessor: in `slot`, one of the blocks that it has at a time, from `start` on."""

    work: Work
    processor: int
    slot: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.work.tiles


def placed(works: Sequence[Work], processors: int, slots: int) -> Iterator[Placed]:
    """Each work tile, in order, where a block ends first; the blocks of a multiprocessor take turns, which is not modelled."""
    free = [(0, slot, processor) for slot in range(slots) for processor in range(processors)]
    heapify(free)
    for work in works:
        start, slot, processor = free[0]
        heapreplace(free, (start + work.tiles, slot, processor))
        yield Placed(work, processor, slot, start)


def blocks_picture(title: str, works: Sequence[Work], processors: int, slots: int, order: str) -> Picture:
    """A lane for each block that a multiprocessor has room for; a bar is a work tile, coloured by head."""
    found = [*placed(works, processors, slots)]
    end = max((one.end for one in found), default=0) or 1
    total = sum(work.tiles for work in works)
    busy = total / (end * processors * slots)
    room = "one block" if slots == 1 else f"{slots} blocks"
    heads = len({work.head for work in works})
    says = (
        f"{len(works)} work tiles (blocks of rows of {heads} heads) on {processors} multiprocessors with room for {room} "
        f"each. {order} A bar is as long as the tiles of keys that it visits, {total} in all: a model, not a measurement. "
        f"The multiprocessors are busy for {busy:.0%} of the time until the last one ends."
    )
    drawn = Picture(title, says)
    unit, left = ROOM / end, 66.0
    for processor in range(processors):
        y = processor * (slots * LANE + 5.0)
        drawn.text(left - 8.0, y + 12.5, f"SM {processor}", "small", "end")
        drawn.rect(left, y, ROOM, slots * LANE, "empty")
    for one in found:
        y = one.processor * (slots * LANE + 5.0) + one.slot * LANE
        wide = one.work.tiles * unit
        words = f"rows' block {one.work.q_block} of head {one.work.head}: {one.work.tiles} tiles"
        drawn.rect(left + one.start * unit, y, wide - 1.0, LANE - 1.0, f"c{one.work.head % 8}", words)
        label = f"{one.work.head}:{one.work.q_block}"
        if len(label) * 5.6 < wide:
            drawn.text(left + one.start * unit + wide / 2, y + 12.0, label, "tiny", "middle")
    bottom = processors * (slots * LANE + 5.0)
    drawn.path(f"M{number(left)} {number(bottom)}H{number(left + ROOM)}", "rule")
    drawn.text(left, bottom + 16.0, "a bar says HEAD:BLOCK OF ROWS", "quiet")
    drawn.text(left + ROOM, bottom + 16.0, "tiles visited →", "quiet", "end")
    return drawn
