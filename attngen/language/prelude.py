"""The named masks and scores of `prelude.attn`, parsed at first use, and their documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.language.functions import FUNCTIONS
from attngen.language.resolve import COMPARISONS, Definition, Scope, definition_of
from attngen.language.syntax import Node, parse
from attngen.source import SourceFile
from attngen.spec.operators import FUNCTIONS as ROWS

PRELUDE_FILE = Path(__file__).parent / "prelude.attn"


@cache
def prelude() -> dict[str, Definition]:
    """Every definition of the prelude by name."""
    return {name: documented.definition for name, documented in documentation().items()}


@cache
def functions() -> frozenset[str]:
    """The functions that read nothing but their arguments, so that Python may call them as `attngen.NAME`: operators, and those
    of the prelude that Python's libraries have too."""
    return ROWS | (prelude().keys() & FUNCTIONS.keys())


@dataclass(frozen=True)
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
        is_mask = body.kind == "binary" and body.value in COMPARISONS
        return "score" if self.definition.is_score else "mask" if is_mask else None

    @property
    def gives(self) -> str:
        """The kind of the definition: a mask, a score or a number."""
        complete = {"score": "a complete score: it contains s, so write `score ...`, not `s + ...`", "mask": "a mask"}
        return complete.get(self.keyword or "", "a number")


@cache
def documentation() -> dict[str, Documented]:
    """Every definition of the prelude with its documentation."""
    source = SourceFile("prelude.attn", PRELUDE_FILE.read_text())
    scope = Scope()
    found = {}
    for node in parse(source):
        definition = definition_of(node, scope, builtin=True)
        found[definition.name] = _documented(definition, _comment_above(source, node))
    scope.names.update({name: documented.definition for name, documented in found.items()})
    return found


def _comment_above(source: SourceFile, node: Node) -> list[str]:
    lines: list[str] = []
    line = node.children[0].span.line - 1
    while source.line(line).startswith("#"):
        lines.insert(0, source.line(line).removeprefix("#").strip())
        line -= 1
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
