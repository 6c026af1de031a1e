"""`build`: CUDA files and their manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import write_whole
from attngen.cli.specs import Gradients, arches_named, load_specs, schedules_named, source_of

if TYPE_CHECKING:
    from attngen.emit.comments import Comments


@click.command("build")
@options.spec
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The directory to write to.  [default: the current directory]",
)
@click.option("--kernel", type=options.SCHEDULES, help="One schedule.  [default: naive, tiled and fused, and the spec's own]")
@options.arches
@options.gradients
@click.option("--saves-lse", is_flag=True, help="Forward: also write lse and what else the backward of the schedule reads.")
@options.comments
@click.option(
    "--cubin", is_flag=True, help="Also compile: write a .cubin for each file, and fill the kernel cache. Needs no GPU."
)
@click.option("--json", "as_json", is_flag=True, help="Print the paths of the written files as JSON.")
def command(
    spec: str, output: Path, kernel: str | None, arch: str | None, gradients: Gradients, saves_lse: bool,
    comments: Comments, cubin: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write CUDA source files, each with a JSON manifest that describes how to launch it.

    \b
    attngen build specs/gpt2.attn                   naive, tiled and fused kernels for sm_80
    attngen build gpt2 --kernel fused --arch sm_90a -o out
    attngen build gpt2 --cubin --arch sm_80,sm_90a  compile ahead of time for two architectures
    attngen build gpt2 --comments teach             with an explanation of every section
    attngen build alibi --kernel fused --saves-lse  a forward for training: its results are inputs of the backward
    attngen build alibi --backward                  gradients of q, k, v and the slopes
    attngen build alibi --backward --wanted q,slopes
    attngen build gpt2 --backward --kernel hopper --deterministic

    A file is named ATTENTION_SCHEDULE.cu, that of a backward ATTENTION_SCHEDULE_backward.cu. Building needs no GPU and no CUDA
    installation. The same spec always gives the same bytes. NVRTC and nvcc compile the files without any header.
    """
    from attngen.emit.emitter import emit
    from attngen.emit.manifest import to_manifest

    if gradients.backward:
        options.refuse("a backward saves no lse", "saves_lse")
    loaded = load_specs(spec)
    arches = arches_named(arch, kernel, loaded)
    todo = [
        (target, schedule, one)
        for one in loaded
        for schedule in schedules_named(kernel, one.spec, gradients.of(one.spec), arches[0])
        for target in arches
    ]
    built = [source_of(one, target, schedule, gradients, comments, saves_lse=saves_lse) for target, schedule, one in todo]
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for (target, _, one), (plan, source) in zip(todo, built, strict=True):
        stem = source.name if len(arches) == 1 else f"{source.name}_{target.name}"
        files = {".cu": source.text.encode(), ".json": to_manifest(source).encode()}
        if cubin:
            from attngen.device.cuda import compiler

            files[".cubin"] = compiler.cubin(emit(one.spec, plan))  # from the text that is compiled to be run
        for suffix, data in files.items():
            write_whole(output / f"{stem}{suffix}", data)
            written.append(str(output / f"{stem}{suffix}"))
    click.echo(json.dumps({"written": written}) if as_json else "\n".join(written))
