"""spec + plan -> Program. Python decides and names; the templates write."""

from __future__ import annotations

from functools import cache

import jinja2

from attngen.emit.abi import as_read
from attngen.emit.comment_text import decision_lines
from attngen.emit.comments import Comments, at_level, with_sections
from attngen.emit.file import File
from attngen.emit.primitives import with_primitives
from attngen.emit.program import Program
from attngen.emit.templates import template_directory
from attngen.emit.variant import build_variant
from attngen.plan.plan import Plan
from attngen.spec.attention import AttentionSpec


def emit(spec: AttentionSpec, plan: Plan, comments: Comments = "brief") -> Program:
    """The CUDA of `spec` under `plan`, and its ABI. Pure: the same text for the same spec, plan and level of comments.

    What is compiled to be run is the brief text, whatever is shown: a kernel is in the cache once.
    """
    variant = build_variant(as_read(spec, plan), plan)
    file: File = plan.schedule.context(spec, plan, variant)
    text = environment().get_template(f"kernels/{plan.schedule.name}.cu.j2").render(file.context())
    return Program(
        name=f"{spec.name}_{plan.keyword}{plan.suffix}",
        text=at_level(with_sections(with_primitives(text, file.forms_of_primitives())), comments),
        arch=plan.arch.name,
        kernels=tuple(k.entry for k in file.launch_order()),
        tensors=tuple(file.tensors.values()),
    )


SETTINGS = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
    "optimized": False,  # constants in templates are few, and looking for them is a tenth of the time that compiling takes
}


@cache
def environment() -> jinja2.Environment:
    """All templates; each is compiled when it is first rendered."""
    settings = {"loader": jinja2.FunctionLoader(_source), "undefined": jinja2.StrictUndefined, **SETTINGS}
    environment = jinja2.Environment(**settings)  # type: ignore[arg-type]
    environment.filters["decision_lines"] = decision_lines
    environment.filters["margin"] = margin
    return environment


def margin(text: str, width: int) -> str:
    """Lines of CUDA, moved to the right, without the last newline; directives of the preprocessor stay where they are."""
    lines = text.rstrip("\n").split("\n")
    return "\n".join(line if line[:1] in ("", "#") else " " * width + line for line in lines)


def _source(name: str) -> tuple[str, str, None]:
    """The text of a template, and the file that tracebacks name. Compiled templates contain this name, so it does not depend on
    where attngen is installed."""
    return (template_directory() / name).read_text("utf-8"), f"templates/{name}", None
