"""Reports of users' mistakes: a title, the place with a caret, and a line that says what to type.

One class per kind of mistake, with its texts as class attributes and the values to fill in as fields. Subclasses of Diagnostic
are frozen dataclasses with keyword arguments:

    class HeadsDoNotDivide(Diagnostic):
        code: ClassVar[str] = "E104"
        title: ClassVar[str] = "{q_heads} query heads cannot share {kv_heads} key/value heads"
        ...
        q_heads: int
        kv_heads: int
"""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import ClassVar, Self, dataclass_transform

from attngen.source import Span

MAX_SHOWN = 160  # characters of a source line that are shown
MAX_VALUE = 400  # characters of a value in a message
MAX_REPORTED = 20  # mistakes of one text that are shown
COLORS = {"error": 31, "warning": 33}  # ANSI codes of severities


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """The base of all kinds. `statement` is the spec's statement at fault, `part` a name in it, `span` its position if the spec
    has a text."""

    code: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str]
    help: ClassVar[str]
    severity: ClassVar[str] = "error"  # or "warning", of a spec that is valid but unlikely to be meant

    statement: str | None = None
    part: str | None = None
    span: Span | None = None

    def __new__(cls, **values: object) -> Self:
        """A kind becomes a dataclass with its first instance: to make dataclasses of all would cost each process 50 ms."""
        for kind in reversed(cls.__mro__):
            if issubclass(kind, Diagnostic) and "__dataclass_fields__" not in vars(kind):
                dataclass(frozen=True, kw_only=True)(kind)
        return super().__new__(cls)

    def _fill(self, text: str) -> str:
        return text.format(**{f.name: _printable(getattr(self, f.name)) for f in fields(self)})

    @property
    def message(self) -> str:
        return self._fill(self.title)

    @property
    def advice(self) -> str:
        return self._fill(self.help)

    def located(self, spans: Mapping[str, Span]) -> Self:
        """The diagnostic with the span of its part or statement, unless it has one already."""
        if self.span is not None or self.statement is None:
            return self
        return replace(self, span=spans.get(f"{self.statement}:{self.part}", spans.get(self.statement)))

    def render(self, color: bool = False) -> str:
        """The diagnostic as text for a terminal; `color` adds ANSI colours."""
        paint = _paint if color else _plain
        color_of = COLORS[self.severity]
        lines = [f"{paint(f'{self.severity}[{self.code}]', color_of)}{paint(': ' + self.message, 1)}"]
        label = self._fill(self.label)
        if self.span is None:
            lines.append(f"  = {label}")
        else:
            lines += excerpt(self.span, label, paint, color_of)
        lines.append(f"{paint('help', 36)}: {self.advice}")
        return "\n".join(lines) + "\n"


def excerpt(span: Span, label: str, paint: _Painter | None = None, color: int = 31) -> list[str]:
    """The lines that show a position: file, line and column, the text, a caret with the label in `color`, an ANSI code."""
    paint = paint or _plain
    number = str(span.line)
    margin = " " * len(number)
    text = span.source.line(span.line)
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(text)
    offset = max(0, start - MAX_SHOWN // 2) if len(text) > MAX_SHOWN else 0
    shown = text[offset : offset + MAX_SHOWN]
    indent = "".join("\t" if c == "\t" else " " * _width(c) for c in shown[: start - offset])
    caret = "^" * max(1, sum(_width(c) for c in shown[start - offset : end - offset]))
    bar = paint("|", 34)
    return [
        f"{margin} {paint('-->', 34)} {_printable(span.source.name)}:{span.line}:{span.column}",
        f"{margin} {bar}",
        f"{paint(number, 34)} {bar} {_printable(shown)}",
        f"{margin} {bar} {indent}{paint(f'{caret} {label}', color)}",
        f"{margin} {bar}",
    ]


def _printable(value: object) -> str:
    """Untrusted text made safe for a terminal: it is cut, and control characters and changes of direction are escaped."""
    text = str(value)
    if len(text) > MAX_VALUE:
        text = f"{text[:MAX_VALUE]}..."
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == "\t" or unicodedata.category(character)[0] not in "CZ" or character == " ":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def _width(character: str) -> int:
    """The number of terminal cells of `character`, as it is shown."""
    shown = _shown(character)
    if shown == character and unicodedata.combining(character):
        return 0
    return len(shown) + (shown == character and unicodedata.east_asian_width(character) in "WF")


def _paint(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _plain(text: str, code: int) -> str:
    return text


_Painter = Callable[[str, int], str]


def counted(count: int, noun: str) -> str:
    """A number of things in words: 1 tile, 2 tiles."""
    return f"{count} {noun}{'s' * (count != 1)}"


class ArgumentError(ValueError):
    """An argument of a call is not valid; the text names it, its value, and what to do."""


def refuse_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError with a suggestion for the first keyword of `given` that is not in `known`."""
    names = list(known)
    for keyword in given:
        if keyword not in names:
            near = get_close_matches(keyword, names, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"its keywords are {', '.join(names)}"
            raise TypeError(f"{function} has no keyword `{keyword}`; {hint}")


class SpecWarning(UserWarning):
    """A spec that is valid, but unlikely to be meant: a mask that allows every pair, a score that is scaled twice."""


def warn(found: Iterable[Diagnostic]) -> None:
    """Issues each of `found` as a SpecWarning at the line of the caller's code: the first outside of this package."""
    for diagnostic in found:
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
            frame, level = frame.f_back, level + 1
        warnings.warn(diagnostic.render(), SpecWarning, stacklevel=level)


class DiagnosticError(ValueError):
    """One or more mistakes of a user. `str()` renders them without colour."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return self.render()

    def render(self, color: bool = False) -> str:
        shown = "\n".join(d.render(color) for d in self.diagnostics[:MAX_REPORTED])
        rest = len(self.diagnostics) - MAX_REPORTED
        return f"{shown}\n... and {rest} more\n" if rest > 0 else shown

    def located(self, spans: Mapping[str, Span]) -> DiagnosticError:
        """The error with spans for its diagnostics."""
        return type(self)(*(d.located(spans) for d in self.diagnostics))
