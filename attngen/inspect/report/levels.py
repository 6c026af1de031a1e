"""The CUDA of a page at the other levels of comments, with line numbers of the brief file, which links refer to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.inspect.report.code import cuda_html
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec


def levels_data(spec: AttentionSpec, plan: Plan, brief: str) -> dict[str, Any]:
    """For each level its highlighted lines, and the number of each line in `brief`: 0 for blank lines and for comments that
    only this level has."""
    lines = brief.splitlines()
    code = [strip_comments(line).rstrip() for line in lines]  # empty for a line that is only a comment
    found: dict[str, Any] = {}
    for level, wanted in (("none", code), ("teach", lines)):
        text = emit(spec, plan, level).text  # type: ignore[arg-type]
        found[level] = {"lines": cuda_html(text), "brief": list(_numbers(text.splitlines(), wanted))}
    return found


def _numbers(shown: list[str], brief: list[str]) -> Iterator[int]:
    """The number in `brief` of each line of `shown`, which contains all lines of `brief` that are not blank, in order."""
    left = iter([(number, line) for number, line in enumerate(brief, 1) if line])
    number, wanted = next(left, (0, None))
    for line in shown:
        if line != wanted:
            yield 0
            continue
        yield number
        number, wanted = next(left, (0, None))
