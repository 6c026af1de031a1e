"""What a help line says to type, typed: the texts that a cure gives. One that only describes what to do gives none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from attngen.diagnostics import Diagnostic

# Words of a help line that stand for what a person has to think of.
STAND_INS = (
    r"(?<![\w`])(?:[abcwxy]|NAME|condition|expression)(?!\w)|\.\.\.|\b(?:for|with|without|such|as|before|the|an|in|to)\b"
)
CHOICE = r"[\w.]+(?:, [\w.]+)*(?:,| or|, or) [\w.]+"


@dataclass(frozen=True)
class Cured:
    """A text after a cure: `line` and `columns` are where it was changed."""

    text: str
    line: int
    columns: range


def cured(found: Diagnostic) -> Iterator[Cured]:
    """The texts that the help line of `found` says to write; each of its alternatives is one."""
    advice = found.advice
    assert found.span is not None
    start, end = found.span.column - 1, found.span.end_column - 1
    line = found.span.source.line(found.span.line)
    covered = line[start:end]
    if declared := re.fullmatch(r"(?:declare it|add): (.+)", advice):
        for statement in re.split(r", or (?=let )", declared[1]):
            if not re.search(STAND_INS, statement):
                yield _with_statement(found, statement, covered)
    elif both := re.fullmatch(r"declare (input .+), and write (\w+) here", advice):
        changed = _changed(found, start, end, both[2]).text
        yield _with_statement(found, both[1], both[2], changed)
    elif removed := re.fullmatch(r"remove `([^`]+)`(?:: .+)?", advice):
        at = line.find(removed[1], start)
        yield _changed(found, at, at + len(removed[1]), "")
    elif options := re.fullmatch(r"use (tile|warps) (.+)", advice):
        pattern = {"tile": r"tile\s+\d+ x \d+", "warps": r"warps\s+\d+"}[options[1]]
        stated = re.compile(pattern).search(line)
        assert stated is not None
        for one in options[2].split(", "):
            yield _changed(found, *stated.span(), f"{options[1]} {one}")
    elif left_out := re.fullmatch(r"leave `(\w+)` to the planner", advice):
        stated = re.compile(rf"{left_out[1]}\s+\d+(?: x \d+)?").search(line)
        assert stated is not None
        yield _changed(found, *stated.span(), "")
    elif choice := re.fullmatch(rf"use (?:one of )?({CHOICE})(?: key/value heads)?", advice):
        for one in re.split(r",? or |, ", choice[1]):
            yield _changed(found, start, end, one)
    elif swapped := re.fullmatch(r"write (\S+) instead of (\S+)", advice):
        new, old = (part.strip("`") for part in swapped.groups())
        at = line.find(old, start)
        yield _changed(found, at, at + len(old), new)
    elif written := re.fullmatch(r"write (?:`([^`]+)`(?:[;:] .+)?|([^`;]+)(?:; .+)?)", advice):
        new = written[1] or written[2]
        if not re.search(STAND_INS, new) and " or " not in new:
            yield _changed(found, *_statement_of(new, line, start, end), new)


def _statement_of(new: str, line: str, start: int, end: int) -> tuple[int, int]:
    """The columns that `new` replaces: the caret's, from the statement's keyword on if `new` is a statement."""
    keyword = re.match(r"(input|param|let|def|heads|head_dim|kernel|tile|rotary|attention)\b", new)
    stated = [m.start() for m in re.finditer(rf"\b{keyword[1]}\b", line) if m.start() <= start] if keyword else []
    return (stated[-1] if stated else start), end


def _changed(found: Diagnostic, start: int, end: int, new: str) -> Cured:
    assert found.span is not None
    lines = found.span.source.text.split("\n")
    before = lines[found.span.line - 1]
    after = lines[found.span.line - 1] = before[:start] + new + before[end:]
    columns = range(start + 1, start + len(new) + 1) if new else range(start + 1, len(after) + 1)
    return Cured("\n".join(lines), found.span.line, columns)


def _with_statement(found: Diagnostic, statement: str, name: str, text: str | None = None) -> Cured:
    """The text with `statement` at the beginning of its first attention, in which `name` is to be no mistake any longer."""
    assert found.span is not None
    source = found.span.source
    whole = source.text if text is None else text
    begun = re.compile(r"^attention[^{]*\{", re.M).search(whole)
    assert begun is not None
    made = f"{whole[: begun.end()]} {statement} {whole[begun.end() :]}"
    at = source.line(found.span.line).find(name)
    return Cured(made, found.span.line, range(at + 1, at + len(name) + 1) if at >= 0 else range(1, 1))
