"""Recovery from syntax errors: parsing continues without the statement at fault, so that all mistakes are reported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language.foreign_words import COMMENT
from attngen.language.syntax import Node, parse
from attngen.source import SourceFile
from attngen.spec import mistakes

MAX_RECOVERIES = 16
MAX_RECOVERED_TEXT = 2**14  # a page or three; beyond it the first mistake is enough

_WORDS = (
    r"attention|def|dtype|head_dim(?=\s*(?:\d|[=:](?!=)))|values(?=\s+k\b)|heads(?=\s+\d)|mask|score|scale|sink|scaled(?=\s+[kv]\b)|dropout|rotary|input|param|let|normalize|precision"
    r"|output|kernel|allow(?=\s+\w)"
)
_BOUNDARY = rf"(?m)^[ \t]*(?:(?:{_WORDS})\b|\}})|(?<=\{{)[ \t]*(?:{_WORDS})\b|(?<=[\w)\]}}])[ \t]+(?:{_WORDS})\b"


@dataclass(frozen=True, slots=True)
class Parsed:
    """The attentions and definitions of a text without its statements at fault, whose mistakes and words are kept."""

    items: tuple[Node, ...]
    problems: tuple[Diagnostic, ...]
    skipped: frozenset[str]

    def consequences(self, diagnostics: list[Diagnostic]) -> list[Diagnostic]:
        """`diagnostics` of the items without those that a skipped statement may have caused."""
        if not self.problems:
            return diagnostics
        explained = (mistakes.MissingStatement, mistakes.Unused, mistakes.NoAttention)
        return [d for d in diagnostics if not isinstance(d, explained) and getattr(d, "name", None) not in self.skipped]


def parse_all(source: SourceFile) -> Parsed:
    """A text with its syntax errors, without those that may be consequences of others."""
    text = source.text
    problems: list[Diagnostic] = []
    lines: set[int] = set()  # with a skipped statement: further mistakes there may be consequences
    skipped: set[str] = set()
    while True:
        try:
            return Parsed(parse(SourceFile(source.name, text), source), tuple(problems), frozenset(skipped))
        except DiagnosticError as error:
            (found,) = error.diagnostics
        if problems and (isinstance(found, mistakes.UnexpectedEnd) or (found.span and found.span.line in lines)):
            break
        if any(found.span == earlier.span for earlier in problems):  # what was skipped is missing there
            break
        problems.append(found)
        if isinstance(found, mistakes.UnexpectedText) and found.expected == "`{`" and found.found in ("`(`", "`[`", "`:`"):
            text = _with_braces(text, _offset(text, found))
            continue
        region = None if len(problems) > MAX_RECOVERIES or len(text) > MAX_RECOVERED_TEXT else _statement(text, found)
        if region is None:
            break
        start, end = region
        skipped |= set(re.findall(r"\w+", text[start:end]))
        lines |= set(range(text.count("\n", 0, start) + 1, text.count("\n", 0, end) + 2))
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return Parsed((), tuple(problems), frozenset(skipped))


def _offset(text: str, found: Diagnostic) -> int:
    """Where in `text` the mistake begins."""
    assert found.span is not None
    return sum(len(line) + 1 for line in text.split("\n")[: found.span.line - 1]) + found.span.column - 1


def _with_braces(text: str, at: int) -> str:
    """`text` with a brace in the place of the bracket or colon at `at`, and another where the bracket is closed."""
    depth = 0
    for found in re.finditer(r"[(\[)\]]", text[at:]) if text[at] != ":" else ():
        depth += 1 if found[0] in "([" else -1
        if depth == 0:
            end = at + found.start()
            text = text[:end] + "}" + text[end + 1 :]
            break
    return text[:at] + "{" + text[at + 1 :]


def _statement(text: str, found: Diagnostic) -> tuple[int, int] | None:
    """The first and last offset of the statement with this mistake; None if they are unknown."""
    if found.span is None:
        return None
    at = _offset(text, found)
    line_start = at - found.span.column + 1
    first_on_line = not text[line_start:at].strip()
    if isinstance(found, mistakes.ForeignSpelling) and found.label_text == COMMENT:
        return at, line_start + found.span.end_column - 1
    boundaries = [m.end() - len(m[0].lstrip()) for m in re.finditer(_BOUNDARY, text)]
    before = [b for b in boundaries if b < at]
    foreign = isinstance(found, mistakes.ForeignSpelling)
    begins = at in boundaries if foreign else first_on_line and at not in boundaries
    start = at if isinstance(found, mistakes.UnknownStatement) or begins or not before else before[-1]
    end = next((b for b in boundaries if b > start and b >= at), len(text))
    if end <= start:
        return None
    inside = text[start:end]
    if inside.count("}") > inside.count("{"):
        end = start + inside.rfind("}")
        inside = text[start:end]
    end = start + len(inside.rstrip())
    return (start, end) if inside.count("{") == inside.count("}") and end > start else None
