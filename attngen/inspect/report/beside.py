"""The page's kernel beside the other schedules of the spec on the same architecture: corresponding lines."""

from __future__ import annotations

from typing import Any

from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect.diff import compare
from attngen.inspect.diff_text import summary
from attngen.inspect.report.code import cuda_html
from attngen.inspect.report.pictures import plans_beside
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec


def beside_data(spec: AttentionSpec, plan: Plan, source: Program) -> list[dict[str, Any]]:
    """For each other schedule: its title, its lines, a summary, and rows of [line of the page's kernel, line of the other,
    block]. A line is 0 if the row has none; a block is the number of a run of lines that moved, or 0."""
    others = (p for schedule, p in plans_beside(spec, plan).items() if schedule != plan.keyword)
    return [_beside(spec, source, other) for other in others]


def _beside(spec: AttentionSpec, source: Program, plan: Plan) -> dict[str, Any]:
    text = emit(spec, plan).text
    compared = compare(source.text, text)
    rows = [[r.left.number if r.left else 0, r.right.number if r.right else 0, r.moved or 0] for r in compared.rows]
    return {"title": plan.title, "lines": cuda_html(text), "rows": rows, "says": summary(compared, "lines of the shorter file")}
