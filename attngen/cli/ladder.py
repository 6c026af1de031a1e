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
HEADER = (
    f"{'step':<30}{'lines':>9}{'global read':>13}{'sectors':>11}{'shared read':>13}{'wavefronts':>12}{'conflicts':>11}"
    f"{'mma':>7}{'barriers':>10}"
)
AFTER = """
From here the schedules go on, whose files differ by more: `attngen diff {name} fused wgmma` (TMA and wgmma), and
`attngen diff {name} wgmma hopper` (warp specialization in a persistent kernel). Puzzles 16 to 19 have their parts singly."""


@click.command("ladder")
@options.spec
@click.option("--step", type=int, help="Print the file of this step.")
@click.option("--diff", "changes", type=int, help="Print what this step changes of the one before.")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Write the files of all steps to this folder."
)
@options.size("--q-len", 1, "Number of queries of the counted problem.", 256)
@options.kv_len
def command(spec: str, step: int | None, changes: int | None, output: Path | None, q_len: int, kv_len: int | None) -> None:
    """Climb from one thread a row to tensor cores and asynchronous copies, one idea a step.

    \b
    attngen ladder gpt2               each step: what bounded the one before, what it changes, exact counts
    attngen ladder gpt2 --step 3      its CUDA
    attngen ladder gpt2 --diff 3      what it changes of step 2
    attngen ladder gpt2 -o lessons    all files

    Each step is a whole kernel of the spec with a small fixed plan, and differs from its neighbour in at most sixty lines. The
    kernels are for reading: right, counted, and never selected by `auto`. They are of fp16 or bf16, with any mask and score
    that read no captured tensors. The emulated device runs and checks them; it needs a C++ compiler and no GPU.
    """
    from attngen.lessons.ladder import rungs

    if step is not None and changes is not None:
        raise click.UsageError("--step prints a file, --diff what it changes; give one of them")
    found = rungs(load_one_spec(spec).spec)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for rung in found:
            write_whole(output / f"{rung.name}.cu", rung.text.encode())
            click.echo(output / f"{rung.name}.cu")
        return
    wanted = step if step is not None else changes
    if wanted is None:
        _show(found, q_len, kv_len or q_len)
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


def _show(found: tuple[Rung, ...], q_len: int, kv_len: int) -> None:
    from attngen.lessons.ladder import counted

    click.echo(f"{found[0].spec.name}: one head, {q_len} rows, {kv_len} keys; counts of the emulated device\n\n{HEADER}")
    before = None
    for rung in found:
        if before is not None:
            for words in (rung.step.bound, rung.step.idea):
                click.echo(click.wrap_text(words, WIDTH, "    ", "    "))
        else:
            click.echo(click.wrap_text(rung.step.idea, WIDTH, "    ", "    "))
        t = counted(rung, q_len, kv_len).totals
        lines = "" if before is None else "-{} +{}".format(*rung.changed(before))
        click.echo(
            f"{rung.step.number} {rung.step.title:<28}{lines:>9}{t.global_read:>13}{t.sectors:>11}{t.shared_read:>13}"
            f"{t.wavefronts:>12}{t.conflicts:>11}{t.mma:>7}{t.barriers:>10}"
        )
        before = rung
    click.echo(AFTER.format(name=found[0].spec.name))
