"""The named masks and scores of `prelude.attn`, and their documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.language.functions import FUNCTIONS
from attngen.language.resolve import COMPARISONS, Definition, Scope, definition_of
from attngen.language.syntax import parse
from attngen.source import SourceFile
from attngen.spec.operators import FUNCTIONS as ROWS

PRELUDE_FILE = Path(__file__).parent / "prelude.attn"
TRUTH_VALUES = COMPARISONS | {"and", "or", "not"}  # operators whose result is a mask


class Prelude(Mapping[str, Definition]):
    """The definitions by name; each is a line, which is parsed when it is first asked for."""

    def __init__(self) -> None:
        self.source = SourceFile("prelude.attn", PRELUDE_FILE.read_text("utf-8"))
        numbered = enumerate(self.source.text.split("\n"), 1)
        self.lines = {found[1]: number for number, line in numbered if (found := re.match(r"def (\w+)", line))}
        self._parsed: dict[str, Definition] = {}

    def __getitem__(self, name: str) -> Definition:
        if name not in self._parsed:
            number = self.lines[name]
            alone = SourceFile(self.source.name, "\n" * (number - 1) + self.source.line(number))
            (node,) = parse(alone, self.source)
            self._parsed[name] = definition_of(node, Scope(prelude=prelude), builtin=True)
        return self._parsed[name]

    def __contains__(self, name: object) -> bool:
        return name in self.lines

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)


@cache
def prelude() -> Prelude:
    """The prelude."""
    return Prelude()


@cache
def functions() -> frozenset[str]:
    """The functions that read nothing but their arguments, so that Python may call them as `attngen.NAME`: operators, and those
    of the prelude that Python's libraries have too."""
    return ROWS | (prelude().keys() & FUNCTIONS.keys())


@dataclass(frozen=True, slots=True)
class Documented:
    """A definition of the prelude and its comment: `arguments` by name, `example` as statements of an attention."""

    definition: Definition
    meaning: str
    arguments: dict[str, str]
    example: str

    @property
    def keyword(self) -> str | None:
        """The statement whose operand the definition is: "mask" or "score"; None if it is a part of others."""
        body = self.definition.body
        is_mask = body.kind in ("binary", "grouped", "unary") and body.value in TRUTH_VALUES
        return "score" if self.definition.is_score else "mask" if is_mask else None

    @property
    def gives(self) -> str:
        """The kind of the definition: a mask, a score or a number."""
        complete = {"score": "a complete score: it contains s, so write `score ...`, not `s + ...`", "mask": "a mask"}
        return complete.get(self.keyword or "", "a number")


@cache
def documentation() -> dict[str, Documented]:
    """Every definition of the prelude with its documentation."""
    known = prelude()
    return {
        name: _documented(definition, _comment_above(known.source, known.lines[name])) for name, definition in known.items()
    }


def _comment_above(source: SourceFile, line: int) -> list[str]:
    lines: list[str] = []
    while source.line(line - 1).startswith("#"):
        line -= 1
        lines.insert(0, source.line(line).removeprefix("#").strip())
    return lines


def _documented(definition: Definition, comment: list[str]) -> Documented:
    parts: dict[str, str] = {"": ""}
    current = ""
    for line in comment:
        begins = re.match(rf"({'|'.join((*definition.parameters, 'example'))}): (.*)", line)
        if begins:
            current, line = begins.groups()
        parts[current] = f"{parts.get(current, '')} {line}".strip()
    meaning, example = parts.pop(""), parts.pop("example", "")
    return Documented(definition, meaning, parts, example)
