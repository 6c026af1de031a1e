"""A comparison of two files as text: side by side on a wide terminal, else one below the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, zip_longest

import click

from attngen.diagnostics import counted
from attngen.inspect.diff import Comparison, Line, Row

SIDE_BY_SIDE = 120  # columns of a terminal for two files side by side
DIGITS = 5  # columns of a line number and a space
LEGEND = "  unchanged   | changed   < only left   > only right   1< >1 moved, as block 1"
COLORS = {"|": "yellow", "<": "red", ">": "green"}
MOVED_COLOR = "cyan"

Paint = Callable[[str, str], str]


def diff_text(comparison: Comparison, titles: tuple[str, str], width: int, context: int | None, color: bool) -> str:
    """The rows of `comparison` below the titles of both files, at most `width` columns wide if they are side by side. `context`
    is the number of unchanged lines around each change; None shows all."""
    paint: Paint = (lambda text, name: click.style(text, fg=name)) if color else (lambda text, name: text)
    left, right = (title.split(",")[0] for title in titles)
    notes = _Notes(comparison, (left, right))
    view = _SideBySide(notes, width, paint) if width >= SIDE_BY_SIDE else _Unified(notes, paint)
    lines = [LEGEND, "", *view.title(*titles)]
    shown: dict[str, int] = {}  # the last line shown of either file
    for part in _folded(comparison.rows, context):
        if isinstance(part, int):
            lines.append(f"    ... {part} lines unchanged")
            shown.clear()
            continue
        numbers = {side: line.number for side, line in (("left", part.left), ("right", part.right)) if line}
        if any(n > shown.get(side, n) + 1 for side, n in numbers.items()):
            lines.append("")  # blank lines of the file
        shown |= numbers
        lines += view.row(part)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def summary(comparison: Comparison, shorter: str) -> str:
    """The number of unchanged and moved lines, and their share."""
    blocks = len(comparison.blocks)
    moved = f" and {comparison.moved} moved in {counted(blocks, 'block')}" if blocks else ""
    return f"of the {comparison.lines} {shorter} {comparison.unchanged} are unchanged{moved}: {comparison.kept:.1%}"


def _folded(rows: tuple[Row, ...], context: int | None) -> Iterator[Row | int]:
    """The rows; those far from any change are replaced by their number."""
    position = 0
    for unchanged, run in groupby(rows, key=lambda row: row.unchanged):
        group = list(run)
        before = 0 if position == 0 else context or 0
        position += len(group)
        after = 0 if position == len(rows) else context or 0
        hidden = len(group) - before - after
        if not unchanged or context is None or hidden <= 1:
            yield from group
        else:
            yield from group[:before]
            yield hidden
            yield from group[len(group) - after :]


def _mark(row: Row) -> str:
    if row.unchanged:
        return " "
    return "|" if row.left and row.right else "<" if row.left else ">"


class _Notes:
    """Notes on where a moved block is in the other file, shown once beside its first line on either side."""

    def __init__(self, comparison: Comparison, titles: tuple[str, str]) -> None:
        self.blocks = comparison.blocks
        self.titles = titles
        self.said: set[tuple[int, bool]] = set()

    def of(self, row: Row) -> str:
        key = (row.moved or 0, row.left is not None)
        if row.moved is None or key in self.said:
            return ""
        self.said.add(key)
        block = self.blocks[row.moved - 1]
        name, (first, last) = (self.titles[1], block.right) if row.left else (self.titles[0], block.left)
        return f"(block {row.moved}: lines {first} to {last} of {name})"


class _SideBySide:
    def __init__(self, notes: _Notes, width: int, paint: Paint) -> None:
        self.column = (width - 5 - 2 * DIGITS) // 2
        self.paint = paint
        self.notes = notes

    def title(self, left: str, right: str) -> list[str]:
        indent = " " * DIGITS
        return [f"{indent}{left:<{self.column}}     {indent}{right}", ""]

    def row(self, row: Row) -> list[str]:
        mark = _mark(row)
        label = f"{row.moved or '':>2}{mark}  " if mark == "<" else f"  {mark}{row.moved or '':<2}"
        note = self.notes.of(row)
        left = self._wrapped(row.left, note)
        right = self._wrapped(row.right, note)
        empty = " " * (DIGITS + self.column)
        color = MOVED_COLOR if row.moved else COLORS.get(mark)
        lines = []
        for first, (a, b) in enumerate(zip_longest(left, right, fillvalue=empty)):
            text = f"{a}{label if first == 0 else '     '}{b}"
            lines.append(self.paint(text, color) if color else text)
        return lines

    def _wrapped(self, line: Line | None, note: str) -> list[str]:
        if line is None:
            return [f"{'':{DIGITS}}{note:<{self.column}}"]
        parts = [line.text[i : i + self.column] for i in range(0, len(line.text), self.column)]
        return [f"{line.number if i == 0 else '':>{DIGITS - 1}} {part:<{self.column}}" for i, part in enumerate(parts)]


class _Unified:
    def __init__(self, notes: _Notes, paint: Paint) -> None:
        self.paint = paint
        self.notes = notes

    def title(self, left: str, right: str) -> list[str]:
        return [f"<  {left}", f">  {right}", ""]

    def row(self, row: Row) -> list[str]:
        if row.unchanged and row.right:
            return [f"    {row.right.text}"]
        lines = []
        if note := self.notes.of(row):
            lines.append(self.paint(f"    {note}", MOVED_COLOR))
        for line, mark in ((row.left, "<"), (row.right, ">")):
            if line is not None:
                color = MOVED_COLOR if row.moved else COLORS[mark]
                lines.append(self.paint(f"{mark}{row.moved or '':<2} {line.text}", color))
        return lines
