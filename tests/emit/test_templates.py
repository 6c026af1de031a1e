"""Templates are read by people: few conditions, and none nested deeper than two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.emit.templates import template_directory

WIDTH = 140  # characters of a line
TAG = re.compile(r"\{%-?\s*(if|endif)\b")
TEMPLATES = template_directory()
FILES = sorted(path for path in TEMPLATES.rglob("*") if path.suffix in (".j2", ".cuh", ".hpp"))
# Those that still have longer lines, each with how many: the number may fall, and a file without any is taken off the list.
WITH_LONG_LINES = {
    "parts/captured_gradient.j2": 4,
    "parts/captured_sums.j2": 11,
}


def depths(text: str) -> list[tuple[int, int]]:
    """The line and the depth of each condition."""
    found, depth = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        for tag in TAG.findall(line):
            depth += 1 if tag == "if" else -1
            if tag == "if":
                found.append((number, depth))
    assert depth == 0
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_no_condition_is_nested_deeper_than_two(path: Path) -> None:
    deep = [line for line, depth in depths(path.read_text()) if depth > 2]
    assert not deep, f"lines {deep}"


def test_no_line_is_too_long() -> None:
    long = {
        str(path.relative_to(TEMPLATES)): sum(len(line) > WIDTH for line in path.read_text().splitlines()) for path in FILES
    }
    assert {name: count for name, count in long.items() if count} == WITH_LONG_LINES


def test_depths_are_counted() -> None:
    assert depths("{% if a %}\n{% if b %}{% endif %}\n{%- if c %}{% endif %}{% endif %}") == [(1, 1), (2, 2), (3, 2)]
