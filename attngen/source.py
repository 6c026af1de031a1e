"""Source texts and positions in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A text and its name in messages."""

    name: str
    text: str

    def line(self, number: int) -> str:
        """Line `number`, counted from 1, without its end."""
        lines = self.text.split("\n")
        return lines[number - 1].rstrip("\r") if 1 <= number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of characters of one source: lines and columns count from 1, `end_column` is exclusive."""

    source: SourceFile
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """From the start of this one to the end of `other`."""
        return Span(self.source, self.line, self.column, other.end_line, other.end_column)
