"""What a user's mistake gets: a title, the place with a caret, and a line that says what to type.

One frozen dataclass per kind of mistake, with its texts as class attributes; fields fill them in:

    @dataclass(frozen=True, slots=True)
    class HeadsDoNotDivide(Diagnostic):
        code = "E104"
        title = "{q_heads} query heads cannot share {kv_heads} key/value heads"
        ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

from attngen.source import Span

MAX_SHOWN = 160  # characters of a source line that are shown
Self = TypeVar("Self", bound="Diagnostic")


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """Base of all kinds. `statement` is the spec's statement that is at fault; `span` the place, where there is a text."""

    code: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str]
    help: ClassVar[str]

    statement: str | None = None
    span: Span | None = None

    def _fill(self, text: str) -> str:
        return text.format(**{f.name: _printable(getattr(self, f.name)) for f in fields(self)})

    @property
    def message(self) -> str:
        return self._fill(self.title)

    def located(self: Self, spans: Mapping[str, Span]) -> Self:
        """With the span of its statement, where it has none of its own."""
        if self.span is None and self.statement is not None and self.statement in spans:
            return replace(self, span=spans[self.statement])
        return self

    def render(self, color: bool = False) -> str:
        """The text for a terminal; `color` adds ANSI colours."""
        paint = _paint if color else _plain
        lines = [f"{paint(f'error[{self.code}]', 31)}{paint(': ' + self.message, 1)}"]
        label = self._fill(self.label)
        if self.span is None:
            lines.append(f"  = {label}")
        else:
            lines += _excerpt(self.span, label, paint)
        lines.append(f"{paint('help', 36)}: {self._fill(self.help)}")
        return "\n".join(lines) + "\n"


def _excerpt(span: Span, label: str, paint: _Painter) -> list[str]:
    number = str(span.line)
    margin = " " * len(number)
    text = span.source.line(span.line)
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(text)
    offset = max(0, start - MAX_SHOWN // 2) if len(text) > MAX_SHOWN else 0
    shown = text[offset : offset + MAX_SHOWN]
    caret = "^" * max(1, min(end, offset + MAX_SHOWN) - start)
    indent = "".join("\t" if c == "\t" else " " for c in shown[: start - offset])
    bar = paint("|", 34)
    return [
        f"{margin} {paint('-->', 34)} {_printable(span.source.name)}:{span.line}:{span.column}",
        f"{margin} {bar}",
        f"{paint(number, 34)} {bar} {_printable(shown)}",
        f"{margin} {bar} {indent}{paint(f'{caret} {label}', 31)}",
        f"{margin} {bar}",
    ]


def _printable(value: object) -> str:
    """Text of a stranger made safe for a terminal: control characters are shown, not sent."""
    return re.sub(r"[^\t\x20-\x7e\xa0-\U0010ffff]", lambda m: f"\\x{ord(m[0]):02x}", str(value))


def _paint(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _plain(text: str, code: int) -> str:
    return text


_Painter = Callable[[str, int], str]


class DiagnosticError(ValueError):
    """One or more mistakes of a user. `str()` is their rendering without colour."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return self.render()

    def render(self, color: bool = False) -> str:
        return "\n".join(d.render(color) for d in self.diagnostics)

    def located(self, spans: Mapping[str, Span]) -> DiagnosticError:
        """The same with the spans of their statements."""
        return type(self)(*(d.located(spans) for d in self.diagnostics))
