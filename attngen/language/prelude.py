"""The named masks and scores of `prelude.attn`, parsed when first asked for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attngen.language.resolve import Definition, Scope, definition_of
from attngen.language.syntax import parse
from attngen.source import SourceFile

PRELUDE_FILE = Path(__file__).parent / "prelude.attn"


@cache
def prelude() -> dict[str, Definition]:
    """Every definition of the prelude by name."""
    scope = Scope()
    definitions = {}
    for node in parse(SourceFile("prelude.attn", PRELUDE_FILE.read_text())):
        definition = definition_of(node, scope, builtin=True)
        definitions[definition.name] = definition
    scope.names.update(definitions)
    return definitions
