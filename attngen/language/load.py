"""Text -> checked AttentionSpecs, with the place of every statement."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language.block import Block, Loaded, check_constant, check_definition, declare
from attngen.language.prelude import definition_of, prelude
from attngen.language.resolve import Resolver, Scope
from attngen.language.syntax import MAX_TEXT, Node, parse
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.attention import AttentionSpec

MAX_ATTENTIONS = 256
MAX_DEFINITIONS = 1000


def load_source(source: SourceFile) -> tuple[Loaded, ...]:
    """Every attention of a text. Raises DiagnosticError with the mistakes found."""
    items = parse(source)
    problems: list[Diagnostic] = []
    scope = _file_scope([item for item in items if item.kind != "attention"], problems)
    blocks = [item for item in items if item.kind == "attention"]
    if not blocks:
        problems.append(mistakes.NoAttention(span=source.span(0, 0)))
    if len(blocks) > MAX_ATTENTIONS:
        raise DiagnosticError(mistakes.TooManyNames(span=blocks[0].span, limit=MAX_ATTENTIONS, what="attentions"))
    loaded: dict[str, Loaded] = {}
    for block in blocks:
        title = block.children[0]
        if title.value in loaded:
            problems.append(mistakes.DuplicateAttention(span=title.span, name=title.value))
            continue
        try:
            loaded[title.value] = Block(source, block, scope).load()
        except DiagnosticError as error:
            problems += error.diagnostics
    if problems:
        raise DiagnosticError(*problems)
    return tuple(loaded.values())


def _file_scope(nodes: list[Node], problems: list[Diagnostic]) -> Scope:
    """The definitions outside of attentions, which all attentions of the file may use."""
    if len(nodes) > MAX_DEFINITIONS:
        raise DiagnosticError(mistakes.TooManyNames(span=nodes[0].span, limit=MAX_DEFINITIONS, what="definitions"))
    scope = Scope(fallback=lambda name: prelude().get(name))
    seen: dict[str, Span] = {}
    for node in nodes:
        try:
            declare(scope, seen, node.children[0], definition_of(node, scope))
            check_definition(node)
        except DiagnosticError as error:
            problems += error.diagnostics
    for node in nodes:
        if node.kind == "let":
            title, body = node.children
            try:
                check_constant(title, body, Resolver({}).expression(body, scope))
            except DiagnosticError as error:
                problems += error.diagnostics
    return scope


def load_text(text: str, filename: str = "<text>") -> tuple[AttentionSpec, ...]:
    """The specs of a text. Raises DiagnosticError."""
    return tuple(one.spec for one in load_source(SourceFile(filename, text)))


def load_path(path: str | PathLike[str]) -> tuple[Loaded, ...]:
    """`load_source` of a file. Raises DiagnosticError for what it says, OSError where it cannot be read."""
    with Path(path).open("rb") as file:
        data = file.read(4 * MAX_TEXT + 4)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = SourceFile(str(path), data[: error.start].decode("utf-8-sig", "replace") + "\N{REPLACEMENT CHARACTER}")
        span = before.span(len(before.text) - 1, len(before.text))
        raise DiagnosticError(mistakes.NotAText(span=span, position=error.start)) from None
    return load_source(SourceFile(str(path), text.replace("\r\n", "\n")))


def load_file(path: str | PathLike[str]) -> tuple[AttentionSpec, ...]:
    """The specs of an `.attn` file. Raises DiagnosticError for what it says, OSError where it cannot be read."""
    return tuple(one.spec for one in load_path(path))
