"""The CUDA of a page at the other levels of comments, each line with its number in the brief file, which all links are of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.inspect.report.code import cuda_html
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec


def levels_data(spec: AttentionSpec, plan: Plan, brief: str) -> dict[str, Any]:
    """By level: highlighted lines, and for each the number of the same line in `brief`, or 0 for blank lines and for comments
    that only this level has."""
    lines = brief.splitlines()
    code = [_code_of(line) for line in lines]
    found: dict[str, Any] = {}
    for level, wanted in (("none", code), ("teach", lines)):
        text = emit(spec, plan, level).text  # type: ignore[arg-type]
        found[level] = {"lines": cuda_html(text), "brief": list(_numbers(text.splitlines(), wanted))}
    return found


def _numbers(shown: list[str], brief: list[str]) -> Iterator[int]:
    """For each of `shown` the number of the same line of `brief`, whose lines that are not blank all occur, in order."""
    left = iter([(number, line) for number, line in enumerate(brief, 1) if line])
    number, wanted = next(left, (0, None))
    for line in shown:
        if line != wanted:
            yield 0
            continue
        yield number
        number, wanted = next(left, (0, None))


def _code_of(line: str) -> str:
    """A line without its comment, and empty if it has nothing else."""
    return strip_comments(line).rstrip()
