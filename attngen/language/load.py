"""Texts and files -> checked AttentionSpecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from attngen.diagnostics import ArgumentError, Diagnostic, DiagnosticError, warn
from attngen.language.block import Block, Loaded, declare
from attngen.language.foreign_words import NAMES
from attngen.language.places import unused_definitions
from attngen.language.prelude import documentation, prelude
from attngen.language.recovery import parse_all
from attngen.language.resolve import Scope
from attngen.language.syntax import Node
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.attention import AttentionSpec
from attngen.spec.names import check_name

MAX_ATTENTIONS = 256


def load_source(source: SourceFile) -> tuple[Loaded, ...]:
    """All attentions of a text. Raises DiagnosticError with the mistakes found."""
    parsed = parse_all(source)
    loaded, problems = _load(source, parsed.items)
    found = [*map(_explained, parsed.problems), *parsed.consequences(problems)]
    if found:
        raise DiagnosticError(*sorted(found, key=_position))
    return loaded


def _explained(problem: Diagnostic) -> Diagnostic:
    """`problem`, whose help has the statement to write if a mask or score of the prelude stands in the place of a keyword."""
    if not isinstance(problem, mistakes.UnknownStatement):
        return problem
    documented = documentation().get(NAMES.get(problem.found, problem.found))
    if documented is None or documented.keyword is None:
        return problem
    return replace(problem, hint=f"a {documented.keyword}", cure=f"write {documented.keyword} {documented.definition.call}")


def _position(diagnostic: Diagnostic) -> tuple[int, int]:
    span = diagnostic.span
    return (span.line, span.column) if span is not None else (0, 0)


def _load(source: SourceFile, items: tuple[Node, ...]) -> tuple[tuple[Loaded, ...], list[Diagnostic]]:
    """The attentions of a text, and the mistakes found."""
    scope = Scope(prelude=prelude)
    seen: dict[str, Span] = {}
    problems: list[Diagnostic] = []
    for item in items:
        if item.kind == "define":
            try:
                declare(scope, seen, item)
            except DiagnosticError as error:
                problems += error.diagnostics
    blocks = [item for item in items if item.kind == "attention"]
    if not blocks:
        return (), [*problems, mistakes.NoAttention(span=Span(source, 1, 1, 1, 2))]
    if len(blocks) > MAX_ATTENTIONS:
        span = blocks[MAX_ATTENTIONS].span
        return (), [*problems, mistakes.TooManyNames(span=span, limit=MAX_ATTENTIONS, what="attentions")]
    loaded: dict[str, Loaded] = {}
    for block in blocks:
        try:
            _check_title(block.children[0], loaded)
            loaded[block.children[0].value] = Block(source, block, scope).load()
        except DiagnosticError as error:
            problems += error.diagnostics
    if loaded and not problems:
        first, one = next(iter(loaded.items()))
        unused = unused_definitions([item for item in items if item.kind == "define"], scope)
        loaded[first] = replace(one, unused=(*unused, *one.unused))
    return tuple(loaded.values()), problems


def _check_title(title: Node, loaded: dict[str, Loaded]) -> None:
    check_name(str(title.value), title.span, title=True)
    if title.value in loaded:
        raise DiagnosticError(mistakes.DuplicateAttention(span=title.span, name=title.value))


def load_text(text: str, filename: str = "<text>") -> tuple[AttentionSpec, ...]:
    """The specs of a text. Raises DiagnosticError; issues a SpecWarning for what is unlikely to be meant."""
    return _specs(load_source(SourceFile(filename, text)))


def load_path(path: str | PathLike[str], attention: str | None = None) -> tuple[Loaded, ...]:
    """`load_source` of a file, or the one called `attention` in it. Raises DiagnosticError for mistakes in the file, OSError if
    it cannot be read, ArgumentError if it has no attention of that name."""
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        source = SourceFile(str(path), data[: error.start].decode("utf-8", "replace"))
        line = source.text.count("\n") + 1
        column = len(source.text.rsplit("\n", 1)[-1]) + 1
        raise DiagnosticError(
            mistakes.NotAText(span=Span(source, line, column, line, column + 1), position=error.start)
        ) from None
    loaded = load_source(SourceFile(str(path), text.replace("\r\n", "\n")))
    if attention is None:
        return loaded
    chosen = tuple(one for one in loaded if one.spec.name == attention)
    if not chosen:
        names = ", ".join(one.spec.name for one in loaded)
        raise ArgumentError(f"{path} has no attention called {attention}; it has {names}")
    return chosen


def load_file(path: str | PathLike[str], attention: str | None = None) -> tuple[AttentionSpec, ...]:
    """The specs of an `.attn` file, or the one called `attention`. Raises DiagnosticError for mistakes in the file, OSError if
    it cannot be read, ArgumentError for a name that it lacks; issues a SpecWarning for what is unlikely to be meant."""
    return _specs(load_path(path, attention))


def choices(name: str, loaded: Sequence[AttentionSpec]) -> str:
    """The names by which the specs `loaded` from the file called `name` are found, in words."""
    *others, last = [f"{name}:{one.name}" for one in loaded]
    return f"{', '.join(others)} or {last}"


def _specs(loaded: tuple[Loaded, ...]) -> tuple[AttentionSpec, ...]:
    for one in loaded:
        warn(one.suspicions())
    return tuple(one.spec for one in loaded)
