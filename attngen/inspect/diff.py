"""The comparison of two generated files: unchanged, moved and new lines.

Lines are compared without indentation and multiple spaces; blank lines are left out. Lines that occur in both files in the same
order are *unchanged*. Of the others, a run of lines that occurs elsewhere in the other file is *moved*.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MOVED_LINES = 3  # with a word in them: a shorter run is a coincidence
WORDS = re.compile(r"\w+")
LIKE = 0.55  # share of common words from which on a line counts as the other one, changed
ADJACENT = 1.0  # score of a pair whose predecessor is a pair too, so that passages win over single brackets


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # counted from 1
    text: str

    @property
    def key(self) -> str:
        return " ".join(self.text.split())


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a diff, left and right. `moved` is the number, from 1, of the moved block that the line belongs to."""

    left: Line | None
    right: Line | None
    moved: int | None = None

    @property
    def unchanged(self) -> bool:
        return self.left is not None and self.right is not None and self.left.key == self.right.key


@dataclass(frozen=True, slots=True)
class Block:
    """A moved block: its first and last line in either file."""

    left: tuple[int, int]
    right: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: tuple[Row, ...]
    blocks: tuple[Block, ...]
    lines: int  # lines of the shorter file, without blank ones
    unchanged: int
    moved: int

    @property
    def kept(self) -> float:
        """The share of the shorter file's lines that the other file contains, unchanged or moved."""
        return (self.unchanged + self.moved) / self.lines if self.lines else 1.0


def compare(left: str, right: str) -> Comparison:
    ours, theirs = _lines(left), _lines(right)
    same = align(len(ours), len(theirs), _equality(ours, theirs))
    moves = _moves(ours, theirs, same)
    left_block, right_block = ({}, {})  # type: tuple[dict[int, int], dict[int, int]]
    for number, (i, j, size) in enumerate(moves, 1):
        left_block.update(dict.fromkeys(range(i, i + size), number))
        right_block.update(dict.fromkeys(range(j, j + size), number))
    rows: list[Row] = []
    i = j = 0
    for a, b in [*same, (len(ours), len(theirs))]:
        gap = [(ours[n], left_block.get(n)) for n in range(i, a)], [(theirs[n], right_block.get(n)) for n in range(j, b)]
        rows += _gap(*gap)
        if a < len(ours):
            rows.append(Row(ours[a], theirs[b]))
        i, j = a + 1, b + 1
    return Comparison(
        rows=tuple(rows),
        blocks=tuple(Block(_numbers(ours[i : i + n]), _numbers(theirs[j : j + n])) for i, j, n in moves),
        lines=min(len(ours), len(theirs)),
        unchanged=len(same),
        moved=sum(size for _, _, size in moves),
    )


def align(rows: int, columns: int, score: Callable[[int, int], float]) -> list[tuple[int, int]]:
    """Pairs (i, j), both increasing, with the greatest sum of `score`. A score of 0 excludes a pair."""
    best = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    ending = [[0.0] * (columns + 1) for _ in range(rows + 1)]  # the best sum that ends with the pair (i, j); 0: not a pair
    for i in range(1, rows + 1):
        above, here, run_above, run = best[i - 1], best[i], ending[i - 1], ending[i]
        for j in range(1, columns + 1):
            most = above[j] if above[j] >= here[j - 1] else here[j - 1]
            if worth := score(i - 1, j - 1):
                run[j] = worth + max(above[j - 1], run_above[j - 1] + ADJACENT if run_above[j - 1] else 0.0)
                most = max(most, run[j])
            here[j] = most
    pairs: list[tuple[int, int]] = []
    i, j, within = rows, columns, False
    while i and j:
        if ending[i][j] and (within or ending[i][j] == best[i][j]):
            pairs.append((i - 1, j - 1))
            before = ending[i - 1][j - 1]
            within = before > 0 and before + ADJACENT >= best[i - 1][j - 1]
            i, j = i - 1, j - 1
        elif best[i - 1][j] >= best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def _numbers(lines: list[Line]) -> tuple[int, int]:
    return lines[0].number, lines[-1].number


def _lines(text: str) -> list[Line]:
    return [Line(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _has_word(line: Line) -> bool:
    return WORDS.search(line.key) is not None


def _equality(ours: list[Line], theirs: list[Line]) -> Callable[[int, int], float]:
    """The score of equal lines: one with a word counts more than a bracket."""
    left, right = [line.key for line in ours], [line.key for line in theirs]
    worth = [2.0 if _has_word(line) else 1.0 for line in ours]
    return lambda i, j: worth[i] if left[i] == right[j] else 0.0


def _moves(ours: list[Line], theirs: list[Line], same: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first of ours, first of theirs, number of lines) of moved blocks, in the order of ours; the longest are found first."""
    ours_left, theirs_left = set(range(len(ours))), set(range(len(theirs)))
    ours_left -= {i for i, _ in same}
    theirs_left -= {j for _, j in same}
    found = []
    while block := _longest(ours, theirs, ours_left, theirs_left):
        i, j, size = block
        ours_left -= set(range(i, i + size))
        theirs_left -= set(range(j, j + size))
        found.append(block)
    return sorted(found)


def _longest(ours: list[Line], theirs: list[Line], ours_left: set[int], theirs_left: set[int]) -> tuple[int, int, int] | None:
    places: dict[str, list[int]] = {}
    for j in sorted(theirs_left):
        places.setdefault(theirs[j].key, []).append(j)
    best, most = None, MOVED_LINES - 1
    for i in sorted(ours_left):
        for j in places.get(ours[i].key, ()):
            size = said = 0
            while i + size in ours_left and j + size in theirs_left and ours[i + size].key == theirs[j + size].key:
                said += _has_word(ours[i + size])
                size += 1
            if said > most:
                best, most = (i, j, size), said
    return best


Placed = tuple[Line, int | None]


def _gap(left: list[Placed], right: list[Placed]) -> list[Row]:
    """The rows between two unchanged lines: changed lines beside each other, others alone."""
    words = {line.number: set(WORDS.findall(line.text)) for line, _ in left}
    others = {line.number: set(WORDS.findall(line.text)) for line, _ in right}

    def alike(i: int, j: int) -> float:
        (a, moved_a), (b, moved_b) = left[i], right[j]
        if moved_a or moved_b or not words[a.number]:
            return 0.0
        shared = len(words[a.number] & others[b.number]) / len(words[a.number] | others[b.number])
        return shared if shared >= LIKE else 0.0

    rows: list[Row] = []
    i = j = 0
    for a, b in [*align(len(left), len(right), alike), (len(left), len(right))]:
        rows += [Row(line, None, moved) for line, moved in left[i:a]]
        rows += [Row(None, line, moved) for line, moved in right[j:b]]
        if a < len(left):
            rows.append(Row(left[a][0], right[b][0]))
        i, j = a + 1, b + 1
    return rows
