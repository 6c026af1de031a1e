"""`package`: a library of C and C++17 that needs no Python."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import words, write_whole
from attngen.cli.specs import arches_named, load_specs, pointing_at

if TYPE_CHECKING:
    from attngen.language import Loaded
    from attngen.package.functions import Packaged, Request
    from attngen.package.library import Library

ALL = "all"
NAME = re.compile(r"[A-Za-z]\w*")


@click.command("package")
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="The directory to write to.",
)
@options.arches
@click.option(
    "--only",
    type=click.Choice(["forward", "backward"]),
    help="Forwards alone, or backwards with the forwards that save what they read.  [default: both]",
)
@click.option(
    "--wanted",
    metavar="NAMES",
    help="The gradients, such as q,k,v,slopes; all: those of captured float tensors and params too.  [default: q,k,v]",
)
@click.option("--deterministic", is_flag=True, help="Gradients have the same bits in every run, at the cost of time.")
@click.option("--kernel", type=options.SCHEDULES, help="One schedule for all.  [default: the spec's own, else auto]")
@click.option("--ptx", is_flag=True, help="Also as PTX, which GPUs newer than those of --arch compile at the first call.")
@click.option("--name", default="attngen", show_default=True, help="The name of the library, and the prefix of its functions.")
@click.option("--json", "as_json", is_flag=True, help="Print the paths of the written files as JSON.")
def command(
    specs: tuple[str, ...], output: Path, arch: str | None, only: str | None, wanted: str | None, deterministic: bool,
    kernel: str | None, ptx: bool, name: str, as_json: bool,
) -> None:  # fmt: skip
    """Write a library of C and C++17 that needs no Python: kernels, a header, the code that launches them, a test program.

    \b
    attngen package gpt2 -o out --arch sm_80,sm_90a          for A100 and H100
    attngen package llama_gqa mine.attn -o out --only forward
    attngen package alibi -o out --wanted q,k,v,slopes       gradients of the slopes too
    attngen package gpt2 -o out --arch sm_80 --ptx           runs on every GPU from sm_80 on

    \b
    cmake -S out -B out/build && cmake --build out/build --target attngen attngen_test
    out/build/attngen_test                                   compares every function with double precision

    For each attention NAME the header has attngen_NAME_forward, attngen_NAME_forward_saving and attngen_NAME_backward, with a
    struct of their arguments. The compiled kernels are in the library; the kernel for a call is selected by the GPU and the
    sizes. Nothing needs a GPU here. The same specs always give the same bytes. docs/package.md has an example.
    """
    from attngen.device.compiled_templates import keep_compiled_templates
    from attngen.package.functions import Request
    from attngen.package.library import files, library

    if NAME.fullmatch(name) is None:
        raise click.BadParameter(f"{name!r} is no name in C", param_hint="--name")
    if only == "forward":
        options.refuse("forwards have no gradients", "wanted", "deterministic")
    loaded = [one for spec in specs for one in load_specs(spec)]
    twice = [n for n, count in Counter(one.spec.name for one in loaded).items() if count > 1]
    if twice:
        raise click.UsageError(f"several attentions are called {twice[0]}; a library has one of a name")
    arches = arches_named(arch, kernel, loaded)
    keep_compiled_templates()
    packaged = []
    for one in loaded:
        request = Request(tuple(arches), kernel, only or "", _wanted(one, wanted), deterministic)
        packaged.append(_packaged(one, request))
        click.echo(f"{one.spec.name}: {_counted(packaged[-1])}", err=True)
    count = sum(len(one.programs) for one in packaged)
    click.echo(f"compiling {count} programs", err=True)
    made = library(name, packaged, ptx=ptx)
    written = files(made)
    for path, data in written.items():
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(output / path, data)
    paths = [str(output / path) for path in written]
    click.echo(json.dumps({"written": paths}) if as_json else _summary(made, written, output))


def _wanted(one: Loaded, wanted: str | None) -> tuple[str, ...] | None:
    """The gradients of an attention."""
    from attngen.spec.gradient import QKV, differentiable

    if wanted == ALL:
        return (*(QKV if one.spec.values is None else QKV[:2]), *differentiable(one.spec))
    return None if wanted is None else tuple(words(wanted))


def _packaged(one: Loaded, request: Request) -> Packaged:
    """The functions of an attention; if it has a forward alone, the refusal says how to package that."""
    from dataclasses import replace

    from attngen.diagnostics import DiagnosticError
    from attngen.package.functions import FORWARD, packaged
    from attngen.spec.gradient import GradientError

    try:
        with pointing_at(one):
            return packaged(one.spec, request)
    except (DiagnosticError, GradientError):
        if not request.only:
            packaged(one.spec, replace(request, only=FORWARD, wanted=None))  # raises if the forward is refused too
            click.echo("note: --only forward packages the forward, without gradients", err=True)
        raise


def _counted(one: Packaged) -> str:
    """The functions of an attention, with the number of programs for each architecture."""
    from attngen.diagnostics import counted

    names = ", ".join(f.name for f in one.functions)
    of_arch = Counter(p.arch for p in one.programs)
    return f"{names}; " + ", ".join(f"{counted(n, 'program')} for {arch}" for arch, n in of_arch.items())


def _summary(made: Library, written: dict[str, bytes], output: Path) -> str:
    """The sizes of the code of each attention, and of the files."""
    lines = []
    for spec in made.specs:
        ids = {p.id for p in spec.programs}
        size = sum(len(i.data) for i in made.images if i.id.removesuffix("_ptx") in ids)
        lines.append(f"{spec.name}: {size / 1e6:.2f} MB of code")
    sources = sum(len(data) for path, data in written.items() if "/" not in path)
    texts = sum(map(len, written.values())) - sources
    lines.append(f"in all {made.code_bytes / 1e6:.2f} MB of code")
    names = ", ".join(path for path in written if "/" not in path)
    lines.append(f"{output}: {names} ({sources / 1e6:.2f} MB); code/ ({len(made.images)} files, {texts / 1e6:.2f} MB of text)")
    return "\n".join(lines)
