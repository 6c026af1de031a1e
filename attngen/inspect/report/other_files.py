"""The page's kernel beside other generated files: other schedules of the spec, and other levels of comments."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.emit.comments import strip_comments
from attngen.emit.emitter import emit
from attngen.inspect.diff import compare
from attngen.inspect.diff_text import summary
from attngen.inspect.report.code import cuda_html
from attngen.inspect.report.pictures import plans_beside
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec


def beside_data(spec: AttentionSpec, plan: Plan, brief: str) -> Iterator[dict[str, object]]:
    """For each other schedule on the same architecture: its title, its lines, a summary, and rows of [line of `brief`, line of
    the other, block]. A line is 0 if the row has none; a block is the number of a run of lines that moved, or 0."""
    for schedule, other in plans_beside(spec, plan).items():
        if schedule != plan.keyword:
            text = emit(spec, other).text
            compared = compare(brief, text)
            rows = [[r.left.number if r.left else 0, r.right.number if r.right else 0, r.moved or 0] for r in compared.rows]
            says = summary(compared, "lines of the shorter file")
            yield {"title": other.title, "lines": cuda_html(text), "rows": rows, "says": says}


def levels_data(spec: AttentionSpec, plan: Plan, brief: str) -> dict[str, object]:
    """For each other level of comments its highlighted lines, and the number of each line in `brief`, which links refer to: 0
    for blank lines and for comments that only this level has."""
    lines = brief.splitlines()
    code = [strip_comments(line).rstrip() for line in lines]  # empty for a line that is only a comment
    found: dict[str, object] = {}
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
