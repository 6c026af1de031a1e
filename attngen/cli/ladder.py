"""`ladder`: lesson kernels of a spec, one idea each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import write_whole
from attngen.cli.specs import load_one_spec

if TYPE_CHECKING:
    from attngen.lessons.ladder import Rung

WIDTH = 110


@click.command("ladder")
@options.spec
@click.option("--backward", is_flag=True, help="The steps of the gradients dQ, dK and dV.")
@click.option("--decoding", is_flag=True, help="The steps of decoding: one row, many keys.")
@click.option("--step", type=int, help="Print the file of this step.")
@click.option("--diff", "changes", type=int, help="Print what this step changes of the one before.")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Write the files of all steps to this folder."
)
@options.size("--q-len", 1, "Number of queries of the counted problem.  [default: 256; 1 with --decoding]")
@options.size("--kv-len", 1, "Number of its keys.  [default: --q-len; 2048 with --decoding]")
def command(
    spec: str,
    backward: bool,
    decoding: bool,
    step: int | None,
    changes: int | None,
    output: Path | None,
    q_len: int | None,
    kv_len: int | None,
) -> None:
    """Climb from one thread a row to a persistent kernel for Hopper, one idea a step.

    \b
    attngen ladder gpt2               each step: what bounded the one before, what it changes, exact counts
    attngen ladder gpt2 --step 3      its CUDA
    attngen ladder gpt2 --diff 3      what it changes of step 2
    attngen ladder gpt2 -o lessons    all files
    attngen ladder gpt2 --backward    the gradients: from one thread a row to additions to dQ
    attngen ladder gpt2 --decoding    one row: from a warp a head to heads that share a load

    Each step is a whole file of the spec with a small fixed plan, and differs from its neighbour in at most sixty lines. The
    kernels are for reading: right, counted, and never selected by `auto`. They support fp16 and bf16, and any mask and
    score that read no captured tensors. The emulated device runs and checks them; it needs a C++ compiler and no GPU.
    """
    from attngen.lessons.ladder import LADDERS, rungs

    if step is not None and changes is not None:
        raise click.UsageError("--step prints a file, --diff what it changes; give one of them")
    if backward and decoding:
        raise click.UsageError("--backward and --decoding are two ladders; give one of them")
    ladder = LADDERS["backward" if backward else "decoding" if decoding else "forward"]
    found = rungs(load_one_spec(spec).spec, ladder)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for rung in found:
            write_whole(output / f"{rung.name}.cu", rung.text.encode())
            click.echo(output / f"{rung.name}.cu")
        return
    wanted = step if step is not None else changes
    if wanted is None:
        _show(spec, found, ladder.sizes(q_len, kv_len))
        return
    first = 1 if step is not None else 2
    if not first <= wanted <= len(found):
        raise click.BadParameter(
            f"the steps are {first} to {len(found)}", param_hint="--step" if step is not None else "--diff"
        )
    click.echo(found[wanted - 1].text if step is not None else _diff(found[wanted - 2], found[wanted - 1]), nl=False)


def _diff(before: Rung, after: Rung) -> str:
    import difflib

    one, other = (rung.own.splitlines(keepends=True) for rung in (before, after))
    return "".join(difflib.unified_diff(one, other, f"{before.name}.cu", f"{after.name}.cu"))


def _show(spec: str, found: tuple[Rung, ...], sizes: dict[str, int]) -> None:
    from attngen.lessons.running import counted, problem_in_words

    ladder = found[0].ladder
    width = max(len(rung.step.title) for rung in found) + 3
    columns = [(what, max(len(what), 11) + 2) for what in ladder.columns]
    click.echo(f"{found[0].spec.name}: {problem_in_words(sizes)}; counts of the emulated device\n")
    click.echo(f"{'step':<{width}}{'lines':>9}" + "".join(f"{what.replace('_', ' '):>{room}}" for what, room in columns))
    before = None
    for rung in found:
        for words in (rung.step.bound, rung.step.idea) if before is not None else (rung.step.idea,):
            click.echo(click.wrap_text(words, WIDTH, "    ", "    "))
        counts = counted(rung, sizes).counts
        lines = "" if before is None else "-{} +{}".format(*rung.changed(before))
        label = f"{rung.step.number} {rung.step.title}"
        click.echo(f"{label:<{width}}{lines:>9}" + "".join(f"{counts[what]:>{room}}" for what, room in columns))
        before = rung
    click.echo(ladder.after.format(spec=spec))
