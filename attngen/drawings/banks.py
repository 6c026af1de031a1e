"""Banks of shared memory: how the rows of a tile lie in them, and which words the lanes of a warp ask of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attngen.drawings.picture import Picture, number, stacked, width_of
from attngen.plan.shared_memory import BANK_GROUPS, CHUNK, COLUMN, Layout

MOST_CHUNKS = 34  # cells of a row that are drawn
WIDE, HIGH = 20.0, 16.0
WIDEST = 760.0  # width of two layouts side by side, at most
BANKS, BANK_BYTES = 32, 4
AT_ONCE = 128  # bytes that shared memory serves at once


def layout_picture(layout: Layout, marked: bool = False) -> Picture:
    """The first eight rows of a tile: a cell is 16 bytes, its number and colour the group of four banks that holds it.
    `marked`: with a frame around eight cells that are read at once."""
    drawn = Picture(layout.name, layout_words(layout))
    chunks, rows, left = min(layout.chunks, MOST_CHUNKS), min(BANK_GROUPS, layout.rows), 26.0
    for row in range(rows):
        drawn.text(left - 6.0, row * HIGH + 12.0, str(row), "small quiet", "end")
        for chunk in range(chunks):
            group, x, y = layout.bank_group(row, chunk), left + chunk * WIDE, row * HIGH
            drawn.rect(x, y, WIDE - 1.0, HIGH - 1.0, f"c{group}")
            if chunk * CHUNK >= layout.data_bytes:
                drawn.path(f"M{number(x)} {number(y + HIGH - 1)}l{number(WIDE - 1)} {number(1 - HIGH)}", "hatch")
            else:
                drawn.text(x + WIDE / 2 - 0.5, y + 11.5, str(group), "tiny", "middle")
    if marked and layout.read:
        column = layout.read == COLUMN
        wide, high = (WIDE - 1.0, rows * HIGH - 1.0) if column else (BANK_GROUPS * WIDE - 1.0, HIGH - 1.0)
        drawn.path(f"M{number(left)} 0h{number(wide)}v{number(high)}h{number(-wide)}z", "ring")
    return drawn


def layout_words(layout: Layout) -> str:
    """Rows, their distance, and in how many groups of banks eight cells lie that are read at once."""
    words = f"{layout.rows} rows of {layout.data_bytes} bytes, "
    words += "swizzled" if layout.swizzled else f"one every {layout.row_bytes} bytes"
    every, free = layout.gap
    words += f", {free} more after every {every}" if free else ""
    if layout.read:
        eight = "eight rows of a column" if layout.read == COLUMN else "eight cells of a row"
        words += f"; {eight}, read at once, lie in {layout.groups_read()} of {BANK_GROUPS} groups"
    return words + (f"; drawn are {MOST_CHUNKS} of {layout.chunks} cells" if layout.chunks > MOST_CHUNKS else "")


def plain(layout: Layout) -> Layout:
    """The same tile without swizzle and padding."""
    return replace(layout, row_bytes=layout.data_bytes, swizzled=False, gap=(1, 0))


def conflict(layout: Layout) -> str:
    """What a read of eight cells costs."""
    groups = layout.groups_read()
    return f"{BANK_GROUPS // groups}-way bank conflict" if 0 < groups < BANK_GROUPS else "no bank conflict"


def swizzle_picture(title: str, layouts: Sequence[Layout]) -> Picture:
    """Each tile as its rows would lie one after another, and as they lie."""
    drawn = Picture(title)
    y = 0.0
    for one in layouts:
        x = bottom = 0.0
        for name, layout in _both(one):
            part = layout_picture(layout, marked=True)
            part.title = f"{one.name}, {name}: {conflict(layout) if one.read else 'not read in eights'}"
            if x + part.width > WIDEST:
                x, y = 0.0, bottom
            drawn.place(part, x, y)
            x, bottom = x + max(part.width, width_of(part.title)) + 30.0, y + part.height + 44.0
        y = bottom
    says = (
        "The first eight rows of each tile. A cell is 16 bytes; its number and colour say which group of four of the 32 "
        "banks holds it. Eight cells that are read at once (framed) take one wavefront if all eight groups differ, and as "
        "many as the fullest group has."
    )
    if any(one.swizzled for one in layouts):
        says += " The swizzle permutes the cells of a row: cell c of row r lies where c xor r % 8 would."
    if any(one.row_bytes > one.data_bytes for one in layouts):
        says += " Hatched cells are padding, which shifts each row against the one before."
    drawn.says = says
    return drawn


def _both(layout: Layout) -> list[tuple[str, Layout]]:
    """The layout before and after; once if they are the same."""
    if plain(layout) == layout:
        return [("as its rows lie", layout)]
    return [("rows one after another", plain(layout)), ("as they lie", layout)]


@dataclass(frozen=True, slots=True)
class Access:
    """What lanes of a warp access at once in shared memory: for each, its number, the byte where it begins, and its width."""

    title: str
    statement: str
    lanes: tuple[tuple[int, int, int], ...]

    def words(self) -> list[list[int]]:
        """By bank, its different words (their numbers), in the order of lanes."""
        found: list[list[int]] = [[] for _ in range(BANKS)]
        for _, at, width in self.lanes:
            for word in range(at // BANK_BYTES, (at + width - 1) // BANK_BYTES + 1):
                if word not in found[word % BANKS]:
                    found[word % BANKS].append(word)
        return found

    @property
    def wavefronts(self) -> int:
        return max(map(len, self.words()), default=0)


def access_picture(access: Access) -> Picture:
    """A column for each bank, a row for each wavefront; in a cell, the first lane whose word it is."""
    ways = access.wavefronts
    verdict = f"{ways} wavefronts" if ways > 1 else "1 wavefront, no bank conflict"
    drawn = Picture(f"{access.title}: {verdict}", "")
    owners: dict[int, list[int]] = {}
    for lane, at, width in access.lanes:
        for word in range(at // BANK_BYTES, (at + width - 1) // BANK_BYTES + 1):
            owners.setdefault(word, []).append(lane)
    left, wide, top = 84.0, 21.0, 20.0
    drawn.text(0.0, 6.0, access.statement, "code")
    drawn.text(left - 8.0, top + 10.0, "bank", "small quiet", "end")
    for bank, words in enumerate(access.words()):
        drawn.text(left + (bank + 0.5) * wide, top + 10.0, str(bank), "tiny quiet", "middle")
        for turn in range(max(ways, 1)):
            y = top + 15.0 + turn * HIGH
            if turn < len(words):
                lanes = owners[words[turn]]
                tip = f"bank {bank}, word {words[turn]}: lanes {', '.join(map(str, lanes))}"
                drawn.rect(left + bank * wide, y, wide - 1.0, HIGH - 1.0, f"c{lanes[0] % 8}", tip)
                drawn.text(left + (bank + 0.5) * wide - 0.5, y + 11.5, str(lanes[0]), "tiny", "middle")
            else:
                drawn.rect(left + bank * wide, y, wide - 1.0, HIGH - 1.0, "empty")
    for turn in range(max(ways, 1)):
        drawn.text(left - 8.0, top + 27.0 + turn * HIGH, f"wavefront {turn}", "small quiet", "end")
    return drawn


def accesses_picture(title: str, accesses: Sequence[Access]) -> Picture:
    """Accesses of one warp, those with the most wavefronts first."""
    says = (
        "Accesses of warp 0 of the first block, each as it occurs first; of 16 bytes a lane the first eight lanes, of 8 "
        "bytes the first sixteen, which are served together. A cell says which lane asks for a word of that bank. A bank "
        "serves one word in a wavefront: words of one bank are served one after another. Lanes that ask for the same word "
        "share it."
    )
    return stacked(title, says, [access_picture(one) for one in accesses])
