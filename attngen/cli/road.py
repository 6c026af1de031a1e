"""`build`, `show`, `explain`: a spec on its way to CUDA."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli.common import (
    EPILOG,
    RUNG_CHOICE,
    arch_option,
    arches_named,
    colored,
    comments_option,
    guarded,
    known_params,
    load_specs,
    name_option,
    param_option,
    rungs_named,
    source_of,
    spec_argument,
    write_whole,
)

if TYPE_CHECKING:
    from attngen.emit.comments import Comments
    from attngen.language import Loaded
    from attngen.plan.arch import Arch


@click.command(epilog=EPILOG)
@spec_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to write; here by default.",
)
@click.option("--kernel", type=RUNG_CHOICE, help="One rung; all three by default.")
@arch_option
@name_option
@comments_option
@click.option("--cubin", is_flag=True, help="Compile too: a .cubin beside each file, and into the cache. Needs no GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@guarded
def build(
    spec: str,
    output: Path,
    kernel: str | None,
    arch: str | None,
    name: str | None,
    comments: Comments,
    cubin: bool,
    as_json: bool,
) -> None:
    """Write CUDA, and a JSON manifest that says how to launch it.

    \b
    attngen build specs/gpt2.attn                      naive, tiled and fused, for sm_80
    attngen build gpt2 --kernel fused --arch sm_90 -o out
    attngen build gpt2 --cubin --arch sm_80,sm_90      compiled ahead, for machines that will serve
    attngen build gpt2 --comments teach                every section explained, step by step

    Needs no GPU and no CUDA. The same spec gives the same bytes every time.
    """
    from attngen.emit.manifest import to_manifest

    loaded = load_specs(spec, name)
    arches = arches_named(arch, kernel, loaded)
    todo = [(target, rung, one) for one in loaded for rung in rungs_named(kernel, one.spec) for target in arches]
    sources = [source_of(one, target, rung, comments)[1] for target, rung, one in todo]
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for (target, rung, one), source in zip(todo, sources, strict=True):
        stem = source.name if len(arches) == 1 else f"{source.name}_{target.name}"
        files = {".cu": source.text.encode(), ".json": to_manifest(source).encode()}
        if cubin:
            from attngen.device.cuda import compiler

            files[".cubin"] = compiler.cubin(source_of(one, target, rung)[1])  # of the text that is compiled to be run
        for suffix, data in files.items():
            write_whole(output / f"{stem}{suffix}", data)
            written.append(str(output / f"{stem}{suffix}"))
    click.echo(json.dumps({"written": written}) if as_json else "\n".join(written))


STAGES = ("tree", "spec", "plan", "loops", "cuda", "ptx", "sass")


@click.command(epilog=EPILOG)
@spec_argument
@click.option("--stage", type=click.Choice(STAGES), default="cuda", show_default=True)
@click.option("--kernel", type=RUNG_CHOICE, help="A rung; the spec's own by default.")
@arch_option
@name_option
@comments_option
@guarded
def show(spec: str, stage: str, kernel: str | None, arch: str | None, name: str | None, comments: Comments) -> None:
    """Print one stage of the road from text to machine code.

    \b
    tree   the syntax tree         spec  what is meant       plan  how it is computed
    loops  the loop nest           cuda  the generated file
    ptx    NVRTC's output          sass  the machine code    each instruction under the CUDA and the spec it came from
    """
    loaded = load_specs(spec, name)
    (target, *_) = arches_named(arch, kernel, loaded)
    if stage == "tree":
        from attngen.inspect.explain import describe_tree
        from attngen.language.syntax import parse
        from attngen.shipped import find_spec
        from attngen.source import SourceFile

        path = find_spec(spec)
        click.echo(describe_tree(parse(SourceFile(str(path), path.read_text()))), nl=False)
        return
    for one in loaded:
        click.echo(_stage(one, stage, kernel, target, comments), nl=False)


def _stage(one: Loaded, stage: str, kernel: str | None, target: Arch, comments: Comments) -> str:
    from attngen.inspect.explain import describe_spec, explain_plan

    if stage == "spec":
        return describe_spec(one.spec)
    plan, source = source_of(one, target, kernel)
    if stage == "plan":
        return explain_plan(one.spec, plan)
    if stage == "cuda":
        return _highlighted(source_of(one, target, kernel, comments)[1].text)
    from attngen.inspect.machine_text import annotated, describe_loops

    if stage == "loops":
        return describe_loops(one, plan, source)
    from attngen.device.cuda.line_table import ptx_code, sass_code

    code = ptx_code(source) if stage == "ptx" else sass_code(source)
    return "\n".join(annotated(one, plan, source, code)) + "\n"


def _highlighted(text: str) -> str:
    if not colored(sys.stdout):
        return text
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import CudaLexer

    return str(highlight(text, CudaLexer(), TerminalFormatter()))


@click.command(epilog=EPILOG)
@spec_argument
@click.option("--kernel", type=RUNG_CHOICE, help="A rung; the spec's own by default.")
@arch_option
@click.option("--q-len", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--kv-len", type=click.IntRange(1), help="As q-len by default.")
@param_option
@name_option
@guarded
def explain(
    spec: str, kernel: str | None, arch: str | None, q_len: int, kv_len: int | None, given: tuple[str, ...], name: str | None
) -> None:
    """Say why: every decision with its reason, the memory map, registers, work, and the tiles that are visited.

    \b
    attngen explain gpt2
    attngen explain mistral_window --q-len 8192 --param size=1024     and what that changes
    attngen explain gpt2 --kernel naive --arch sm_90a

    Registers and spills are what NVRTC says, which needs no GPU. The roofline is that of one GPU of the architecture, by its
    data sheet. Operations and bytes are of one batch; of one head where the spec leaves heads open.
    """
    from attngen.inspect.explain import explain_plan, explain_tiles
    from attngen.inspect.explain_work import explain_changes, explain_work
    from attngen.inspect.occupancy import explain_occupancy
    from attngen.inspect.prepare import check_call
    from attngen.reference.problems import Shape

    loaded = load_specs(spec, name)
    (target, *_) = arches_named(arch, kernel, loaded)
    lengths = (q_len, q_len if kv_len is None else kv_len)
    for one in loaded:
        plan, source = source_of(one, target, kernel)
        params = known_params(one.spec, given)
        check_call(one.spec, Shape(1, q_len=lengths[0], kv_len=lengths[1]), params)
        click.echo(explain_plan(one.spec, plan))
        click.echo(explain_occupancy(source, target))
        click.echo(explain_work(one.spec, plan, *lengths, params))
        click.echo(explain_tiles(one.spec, plan, *lengths, params))
        changes = explain_changes(one.spec, plan, *lengths, params)
        if changes:
            click.echo(changes)
