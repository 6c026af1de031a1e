"""Verdicts, and the list of puzzles, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from attngen.diagnostics import excerpt
from attngen.puzzles.counts import MEDALS, Medal, Part, Target
from attngen.puzzles.folder import Folder
from attngen.puzzles.verdict import EXACT, Problem, Verdict
from attngen.source import SourceFile, Span

LINES = 3  # statements named for a count that is too large
COLORS: Mapping[str, str] = {"bronze": "yellow", "silver": "white", "gold": "bright_yellow"}


def verdict_text(verdict: Verdict, text: str) -> str:
    """The first problem with its place; or the medal, the counts, and what is missing for the next medal."""
    advice = f"note: puzzles need g++, and this is {verdict.compiler}: some accesses are divided or not seen; set CXX=g++\n"
    note = "" if verdict.compiler == EXACT else advice
    if verdict.problem is not None:
        return _problem_text(verdict.problem, SourceFile(verdict.file, text)) + note
    lines = [f"right: {'; '.join(verdict.cases)}", "", *_table(verdict), "", _medal_line(verdict)]
    lines += _missing(verdict, text)
    if verdict.gpu is not None:
        ran = verdict.gpu
        lines += ["", f"right on {ran.gpu}: {ran.what}, {ran.microseconds:.1f} us, {ran.rates}"]
    return "\n".join(lines) + "\n" + note


def _problem_text(problem: Problem, source: SourceFile) -> str:
    lines = [f"{click.style('error', fg='red', bold=True)}: {problem.message}"]
    if problem.line:
        shown = source.line(problem.line)
        begin = len(shown) - len(shown.lstrip())
        end = len(shown.split("//")[0].rstrip()) if shown.strip()[:2] != "//" else len(shown)
        span = Span(source, problem.line, begin + 1, problem.line, max(begin + 1, end) + 1)
        lines += [line.rstrip() for line in excerpt(span, problem.label)]
    lines += [f"  = {note}" for note in problem.notes]
    if problem.help:
        lines.append(f"{click.style('help', fg='cyan')}: {problem.help}")
    return "\n".join(lines) + "\n"


def _table(verdict: Verdict) -> list[str]:
    width = max(len(c.target.words) for c in verdict.counted)
    head = f"{'':<{width}}{'counted':>12}{'silver':>12}{'gold':>12}"
    rows = [
        f"{c.target.words:<{width}}{c.number:>12}{_limit(c.target, 'silver'):>12}{_limit(c.target, 'gold'):>12}"
        for c in verdict.counted
    ]
    return [head, *rows, f"counted with {verdict.cases[0]}"]


def _limit(target: Target, medal: Medal) -> str:
    limit = target.limit(medal)
    return "any" if limit is None else f"{'>=' if target.at_least else '<='} {limit}" if limit or target.at_least else "0"


def _medal_line(verdict: Verdict) -> str:
    return f"medal: {click.style(verdict.medal, fg=COLORS[verdict.medal], bold=True)}"


def _missing(verdict: Verdict, text: str) -> list[str]:
    """What the next medal wants, and the lines with the largest parts of it."""
    if verdict.medal == MEDALS[-1]:
        return []
    wanted = MEDALS[MEDALS.index(verdict.medal) + 1]
    lines: list[str] = []
    source = text.splitlines()
    for c in verdict.counted:
        if c.target.allows(c.number, wanted):
            continue
        bound = "at least" if c.target.at_least else "at most"
        lines.append(f"for {wanted}: {c.target.words}, {bound} {c.target.limit(wanted)}; counted {c.number}")
        lines += [] if c.target.at_least else [_part(part, c.lines, source[part.line - 1]) for part in c.lines[:LINES]]
    return lines


def _part(part: Part, parts: Sequence[Part], text: str) -> str:
    """One statement; `needed` is of all statements that access its array, so that their sum stands beside it."""
    total = sum(other.number for other in parts if other.array == part.array)
    of_all = f"{total} in all, " if total > part.number else ""
    of = f" of {part.array} ({of_all}{part.needed} for gold)" if part.needed is not None else ""
    return f"  line {part.line}: {part.number}{of}   {text.strip()}"


def targets_text(targets: Sequence[Target], what: str) -> str:
    """What is counted of a right kernel, with the limits of the medals; `what` are the sizes, in words."""
    width = max(len(target.words) for target in targets)
    rows = [f"{t.words:<{width}}{_limit(t, 'silver'):>12}{_limit(t, 'gold'):>12}" for t in targets]
    return "\n".join([f"{'right: bronze; then counted':<{width}}{'silver':>12}{'gold':>12}", *rows, f"counted with {what}"])


def list_text(folders: Sequence[Folder], medals: Mapping[str, Medal], started: Sequence[str]) -> str:
    """One line for each puzzle: number, name, medal, what it teaches."""
    width = max(len(folder.puzzle.title) for folder in folders)
    lines = []
    for folder in folders:
        medal = medals.get(folder.name, "")
        state = medal or ("started" if folder.name in started else "-")
        shown = click.style(f"{state:<8}", fg=COLORS[medal]) if medal else f"{state:<8}"
        lines.append(f"{folder.number:>3}  {shown} {folder.puzzle.title:<{width}}  {folder.puzzle.teaches}")
    return "\n".join(lines) + "\n"
