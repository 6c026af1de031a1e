"""`show`: one stage between a spec and its machine code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import colored
from attngen.cli.specs import Gradients, arch_named, load_specs, source_of

if TYPE_CHECKING:
    from attngen.device.cuda.line_table import MachineLine
    from attngen.emit.comments import Comments
    from attngen.emit.program import Program
    from attngen.language import Loaded
    from attngen.plan import Plan
    from attngen.source import SourceFile

    Build = Callable[[Loaded], tuple[Plan, Program]]

STAGES = ("tree", "spec", "plan", "loops", "cuda", "ptx", "sass")


@click.command("show")
@options.spec
@click.option("--stage", type=click.Choice(STAGES), default="cuda", show_default=True, help="What to print; see above.")
@options.kernel
@options.arch
@options.gradients
@options.comments
@click.option("--json", "as_json", is_flag=True, help="Print the stage as data, not as text; docs/json.md lists the keys.")
def command(
    spec: str, stage: str, kernel: str | None, arch: str | None, gradients: Gradients,
    comments: Comments, as_json: bool,
) -> None:  # fmt: skip
    """Print one stage of the translation from text to machine code.

    \b
    tree   the syntax tree of the file
    spec   the checked spec: every field, with defaults filled in
    plan   tile sizes, pipeline stages and shared memory, with reasons
    loops  the loop nest: who runs each loop, and where its operands are
    cuda   the generated file
    ptx    the output of NVRTC; each instruction below the line of CUDA and of the spec that it came from
    sass   the machine code, annotated in the same way; needs nvdisasm (`attngen doctor`)

    \b
    attngen show gpt2
    attngen show gpt2 --stage plan --kernel hopper
    attngen show gpt2 --stage sass --json
    attngen show alibi --backward                       gradients of q, k, v and the slopes
    """
    planning = ("kernel", "arch", "backward", "wanted", "deterministic")
    if stage in ("tree", "spec"):
        options.refuse(f"stage {stage} comes before the plan of a kernel", *planning, "comments")
    elif stage == "plan" or not (as_json or stage == "cuda"):
        options.refuse(f"stage {stage} shows no comments", "comments")
    loaded = load_specs(spec)
    target = arch_named(arch, kernel, loaded)
    if stage == "tree":
        click.echo(_tree(loaded[0].source, as_json), nl=False)
        return
    level = comments if as_json or stage == "cuda" else "brief"

    def build(one: Loaded) -> tuple[Plan, Program]:
        return source_of(one, target, kernel, gradients, level)

    if as_json:
        shown = [{"attention": one.spec.name, **_stage_data(one, stage, build)} for one in loaded]
        click.echo(json.dumps({"stage": stage, "attentions": shown}, indent=2))
        return
    click.echo("".join([_stage_text(one, stage, build) for one in loaded]), nl=False)


def _tree(source: SourceFile, as_json: bool) -> str:
    from attngen.inspect.data import tree_data
    from attngen.inspect.explain import describe_tree
    from attngen.language.syntax import parse

    nodes = parse(source)
    return json.dumps({"stage": "tree", "nodes": tree_data(nodes)}, indent=2) + "\n" if as_json else describe_tree(nodes)


def _stage_data(one: Loaded, stage: str, build: Build) -> dict[str, object]:
    """The data of `stage` for one attention; docs/json.md defines the keys."""
    from attngen.inspect import data

    if stage == "spec":
        return {"spec": data.spec_data(one.spec)}
    plan, source = build(one)
    if stage == "plan":
        return {"plan": data.plan_data(plan)}
    if stage == "loops":
        return {"loops": data.loops_data(one.spec, plan, source)}
    if stage == "cuda":
        return data.cuda_data(source)
    return {"lines": data.machine_data(one, plan, source, _machine_code(stage, source))}


def _stage_text(one: Loaded, stage: str, build: Build) -> str:
    from attngen.inspect.explain import describe_spec, explain_plan

    if stage == "spec":
        return describe_spec(one.spec)
    plan, source = build(one)
    if stage == "plan":
        return explain_plan(one.spec, plan)
    if stage == "cuda":
        return _highlighted(source.text)
    from attngen.inspect.machine_text import annotated, describe_loops

    if stage == "loops":
        return describe_loops(one, plan, source)
    return "\n".join(annotated(one, plan, source, _machine_code(stage, source))) + "\n"


def _machine_code(stage: str, source: Program) -> tuple[MachineLine, ...]:
    from attngen.device.cuda.line_table import ptx_code, sass_code

    return ptx_code(source) if stage == "ptx" else sass_code(source)


def _highlighted(text: str) -> str:
    if not colored(sys.stdout):
        return text
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import CudaLexer

    return str(highlight(text, CudaLexer(), TerminalFormatter()))
