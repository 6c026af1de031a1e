"""The named masks and scores of `prelude.attn`, parsed when first asked for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attngen.language.resolve import Definition, Scope
from attngen.language.syntax import Node, parse
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


def prelude_names() -> tuple[str, ...]:
    return tuple(prelude())


def definition_of(node: Node, scope: Scope, builtin: bool = False) -> Definition:
    """The Definition that a `def` statement makes."""
    name, *middle, body = node.children
    parameters = tuple(p.value for p in middle[0].children) if middle else ()
    return Definition(str(name.value), parameters, body, scope, builtin)
