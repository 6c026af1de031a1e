"""`build`, `show`, `explain`: from a spec to CUDA, stage by stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen.cli.common import (
    EPILOG,
    RUNG_CHOICE,
    arch_option,
    arches_named,
    arches_option,
    colored,
    comments_option,
    guarded,
    kernel_option,
    known_params,
    kv_len_option,
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
    help="The directory to write to.  [default: the current directory]",
)
@click.option("--kernel", type=RUNG_CHOICE, help="One schedule.  [default: naive, tiled and fused, and the spec's own]")
@arches_option
@name_option
@comments_option
@click.option(
    "--cubin", is_flag=True, help="Also compile: write a .cubin for each file, and fill the kernel cache. Needs no GPU."
)
@click.option("--json", "as_json", is_flag=True, help="Print the paths of the written files as JSON.")
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
    """Write CUDA source files, each with a JSON manifest that describes how to launch it.

    \b
    attngen build specs/gpt2.attn                   naive, tiled and fused kernels for sm_80
    attngen build gpt2 --kernel fused --arch sm_90 -o out
    attngen build gpt2 --cubin --arch sm_80,sm_90   compile ahead of time for two architectures
    attngen build gpt2 --comments teach             with an explanation of every section

    A file is named ATTENTION_SCHEDULE.cu. Building needs no GPU and no CUDA installation. The same spec always gives the same
    bytes. NVRTC and nvcc compile the files without any header.
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
@click.option("--stage", type=click.Choice(STAGES), default="cuda", show_default=True, help="What to print; see above.")
@kernel_option
@arch_option
@name_option
@comments_option
@click.option("--json", "as_json", is_flag=True, help="Print the stage as data, not as text; docs/json.md lists the keys.")
@guarded
def show(
    spec: str, stage: str, kernel: str | None, arch: str | None, name: str | None, comments: Comments, as_json: bool
) -> None:
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
    """
    loaded = load_specs(spec, name)
    (target, *_) = arches_named(arch, kernel, loaded)
    if stage == "tree":
        from attngen.inspect.explain import describe_tree
        from attngen.language.syntax import parse
        from attngen.shipped import find_spec
        from attngen.source import SourceFile

        path = find_spec(spec)
        nodes = parse(SourceFile(str(path), path.read_text()))
        click.echo(
            _json_of({"stage": "tree", "nodes": _data().tree_data(nodes)}) if as_json else describe_tree(nodes), nl=False
        )
        return
    if as_json:
        shown = [_stage_data(one, stage, kernel, target, comments) for one in loaded]
        click.echo(_json_of({"stage": stage, "attentions": shown}), nl=False)
        return
    for one in loaded:
        click.echo(_stage(one, stage, kernel, target, comments), nl=False)


def _data() -> Any:
    """The module that makes plain values; imported late, like all that builds or compiles."""
    from attngen.inspect import data

    return data


def _json_of(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _stage_data(one: Loaded, stage: str, kernel: str | None, target: Arch, comments: Comments) -> dict[str, Any]:
    """One attention at `stage`, as plain values."""
    data = _data()
    named = {"attention": one.spec.name}
    if stage == "spec":
        return named | {"spec": data.spec_data(one.spec)}
    plan, source = source_of(one, target, kernel, comments)
    if stage == "plan":
        return named | {"plan": data.plan_data(plan)}
    if stage == "loops":
        return named | {"loops": data.loops_data(one.spec, plan, source)}
    if stage == "cuda":
        return {**named, **data.cuda_data(source)}
    from attngen.device.cuda.line_table import ptx_code, sass_code

    code = ptx_code(source) if stage == "ptx" else sass_code(source)
    return named | {"lines": data.machine_data(one, plan, source, code)}


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
@kernel_option
@arch_option
@click.option("--q-len", type=click.IntRange(1), default=2048, show_default=True, help="Number of queries.")
@kv_len_option
@param_option
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print the same as data; docs/json.md lists the keys.")
@guarded
def explain(
    spec: str, kernel: str | None, arch: str | None, q_len: int, kv_len: int | None, given: tuple[str, ...], name: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Explain a kernel: decisions with reasons, shared memory, registers, occupancy, work, roofline, and visited tiles.

    \b
    attngen explain gpt2
    attngen explain mistral_window --q-len 8192 --param size=1024   and what this value changes
    attngen explain gpt2 --kernel naive --arch sm_90a

    Registers and spills come from NVRTC, which needs no GPU. The roofline uses the data sheet of one GPU of the architecture.
    Operations and bytes are of one batch, and of one head unless the spec states `heads`.
    """
    from attngen.inspect.explain import explain_plan, explain_tiles
    from attngen.inspect.explain_work import explain_changes, explain_work
    from attngen.inspect.occupancy import explain_occupancy
    from attngen.inspect.prepare import check_call
    from attngen.reference.problems import Shape

    loaded = load_specs(spec, name)
    (target, *_) = arches_named(arch, kernel, loaded)
    lengths = (q_len, q_len if kv_len is None else kv_len)
    explained = []
    for one in loaded:
        plan, source = source_of(one, target, kernel)
        params = known_params(one.spec, given)
        check_call(one.spec, Shape(1, q_len=lengths[0], kv_len=lengths[1]), params)
        if as_json:
            explained.append(_data().explain_data(one.spec, plan, source, *lengths, params))
            continue
        click.echo(explain_plan(one.spec, plan))
        click.echo(explain_occupancy(source, target))
        click.echo(explain_work(one.spec, plan, *lengths, params))
        click.echo(explain_tiles(one.spec, plan, *lengths, params))
        changes = explain_changes(one.spec, plan, *lengths, params)
        if changes:
            click.echo(changes)
    if as_json:
        click.echo(_json_of({"attentions": explained}), nl=False)
