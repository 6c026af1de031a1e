"""Templates are read by people: few conditions, and none nested deeper than two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.emit.templates import template_directory

TAG = re.compile(r"\{%-?\s*(if|endif)\b")
TEMPLATES = template_directory()
FILES = sorted(path for path in TEMPLATES.rglob("*") if path.suffix in (".j2", ".cuh"))


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


def test_depths_are_counted() -> None:
    assert depths("{% if a %}\n{% if b %}{% endif %}\n{%- if c %}{% endif %}{% endif %}") == [(1, 1), (2, 2), (3, 2)]
