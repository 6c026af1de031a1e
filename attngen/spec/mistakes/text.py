"""Mistakes of the text itself, E0: characters, brackets, numbers, words of other languages."""

from __future__ import annotations

from typing import ClassVar

from attngen.diagnostics import Diagnostic


class UnexpectedCharacter(Diagnostic):
    code: ClassVar[str] = "E001"
    title: ClassVar[str] = "unexpected character {character}"
    label: ClassVar[str] = "not allowed here"
    help: ClassVar[str] = "{instead}"

    character: str
    instead: str


class UnexpectedText(Diagnostic):
    code: ClassVar[str] = "E002"
    title: ClassVar[str] = "unexpected {found}"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "{instead}"

    found: str
    expected: str
    instead: str


class UnexpectedEnd(Diagnostic):
    code: ClassVar[str] = "E003"
    title: ClassVar[str] = "the text ends too early"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "complete the statement, and close every bracket and brace"

    expected: str


class TextTooLong(Diagnostic):
    code: ClassVar[str] = "E004"
    title: ClassVar[str] = "the text has {size} characters"
    label: ClassVar[str] = "the limit is {limit}"
    help: ClassVar[str] = "split it into several files"

    size: int
    limit: int


class NestedTooDeeply(Diagnostic):
    code: ClassVar[str] = "E005"
    title: ClassVar[str] = "the expression is nested too deeply"
    label: ClassVar[str] = "more than {limit} levels"
    help: ClassVar[str] = "a long chain has fewer levels in groups: (a or b) or (c or d), not a or b or c or d"

    limit: int


class NumberTooLarge(Diagnostic):
    code: ClassVar[str] = "E006"
    title: ClassVar[str] = "the number {number} is too large"
    label: ClassVar[str] = "the limit is {limit}"
    help: ClassVar[str] = "use a smaller number"

    number: str
    limit: str


class NotAText(Diagnostic):
    code: ClassVar[str] = "E007"
    title: ClassVar[str] = "the file is not UTF-8 text"
    label: ClassVar[str] = "byte {position} is not valid UTF-8"
    help: ClassVar[str] = "save the file as UTF-8"

    position: int


class ForeignSpelling(Diagnostic):
    code: ClassVar[str] = "E008"
    title: ClassVar[str] = "`{found}` is not in this language"
    label: ClassVar[str] = "{label_text}"
    help: ClassVar[str] = "{cure}"

    found: str
    label_text: str
    cure: str
