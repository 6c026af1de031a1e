"""`diff`: two rungs of a spec beside each other."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import click

from attngen.cli.common import (
    EPILOG,
    arches_named,
    colored,
    comments_option,
    guarded,
    load_specs,
    name_option,
    source_of,
    spec_argument,
)

if TYPE_CHECKING:
    from attngen.emit.comments import Comments
    from attngen.emit.kernel_source import KernelSource
    from attngen.inspect.diff import Comparison
    from attngen.language import Loaded
    from attngen.plan import Plan
    from attngen.plan.arch import Arch

RUNGS = ("naive", "tiled", "fused", "wgmma", "hopper")


@click.command(epilog=EPILOG)
@spec_argument
@click.argument("left", metavar="RUNG[@ARCH]")
@click.argument("right", metavar="RUNG[@ARCH]")
@click.option("--arch", help="An architecture for both.  [default: the plainest that has both rungs]")
@name_option
@comments_option
@click.option("--context", type=click.IntRange(0), default=3, show_default=True, help="Unchanged lines around each change.")
@click.option("--full", is_flag=True, help="Every line, unchanged or not.")
@click.option(
    "--width", type=click.IntRange(20), help="Columns; the terminal's by default. Below 120 one file under the other."
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers alone, as JSON.")
@guarded
def diff(
    spec: str,
    left: str,
    right: str,
    arch: str | None,
    name: str | None,
    comments: Comments,
    context: int,
    full: bool,
    width: int | None,
    as_json: bool,
) -> None:
    """Show what changes from one rung to another, side by side.

    \b
    attngen diff gpt2 naive tiled                tiles in shared memory, sums in registers
    attngen diff gpt2 tiled fused                no S in memory: the online softmax
    attngen diff gpt2 fused@sm_75 fused@sm_80    tensor cores, copies in the background
    attngen diff gpt2 fused wgmma                TMA, products of four warps at once
    attngen diff gpt2 wgmma hopper               a warpgroup that copies, blocks that stay

    Without an architecture it is the plainest that has both rungs: tiled beside fused is for sm_75, where both multiply on
    ordinary units and the fusion is what differs.

    The last lines say what part of the shorter file is kept. Lines are compared without indentation and blank ones are left
    out. Unchanged is what stands in both files in the same order; moved are runs of at least three lines of what is left that
    stand elsewhere in the other file, each shown as a block with a number. The second figure is of the code without comments.
    """
    from attngen.inspect.diff_text import diff_text, summary

    numbers = []
    for one in load_specs(spec, name):
        (plan, source), (other_plan, other) = _sides(one, left, right, arch, comments)
        compared, code = _compared(source, other)
        numbers.append({"spec": one.spec.name, "lines": _numbers(compared), "code": _numbers(code)})
        if as_json:
            continue
        titles = _title(source, plan), _title(other, other_plan)
        columns = width or shutil.get_terminal_size().columns
        click.echo(diff_text(compared, titles, columns, None if full else context, colored(sys.stdout)))
        click.echo(summary(compared, "lines of the shorter file"))
        click.echo(summary(code, "lines of its code"))
        if plan.rung != other_plan.rung:
            click.echo("".join(_elsewhere(spec, one, side) for side in (plan, other_plan)), nl=False)
    if as_json:
        click.echo(json.dumps(numbers))


def _compared(left: KernelSource, right: KernelSource) -> tuple[Comparison, Comparison]:
    """The files, and their code alone."""
    from attngen.emit.comments import strip_comments
    from attngen.inspect.diff import compare

    return compare(left.text, right.text), compare(strip_comments(left.text), strip_comments(right.text))


def _numbers(compared: Comparison) -> dict[str, float]:
    return {"lines": compared.lines, "unchanged": compared.unchanged, "moved": compared.moved, "kept": compared.kept}


def _title(source: KernelSource, plan: Plan) -> str:
    return f"{source.name}, by {plan.schedule} for {plan.arch.name} ({plan.arch.what})"


def _elsewhere(spec: str, one: Loaded, plan: Plan) -> str:
    """Where to look on, if the architecture that one plans for by default has another schedule for this rung."""
    from attngen.plan import default_arch

    (usual,) = arches_named(default_arch(plan.rung), plan.rung, [one])
    schedule = source_of(one, usual, plan.rung)[0].schedule
    if schedule == plan.schedule:
        return ""
    step = f"attngen diff {spec} {plan.rung}@{plan.arch.name} {plan.rung}@{usual.name}"
    return f"for {usual.name} {plan.rung} is {schedule}: {step}\n"


def _sides(
    one: Loaded, left: str, right: str, arch: str | None, comments: Comments
) -> tuple[tuple[Plan, KernelSource], tuple[Plan, KernelSource]]:
    """Both files. Raises BadParameter where they are one file, or not rungs."""
    sides = (_side(left), _side(right))
    common = _common_arch(one, (sides[0][0], sides[1][0]))
    (rung, target), (other, other_target) = (
        (rung, arches_named(named or arch or common, rung, [one])[0]) for rung, named in sides
    )
    if (rung, target) == (other, other_target):
        raise click.BadParameter(f"both are {rung} for {target.name}; name two rungs, or two architectures as in fused@sm_80")
    return source_of(one, target, rung, comments), source_of(one, other_target, other, comments)


def _side(text: str) -> tuple[str, str | None]:
    rung, _, arch = text.partition("@")
    if rung not in RUNGS:
        raise click.BadParameter(f"no rung is called {rung}; there are {', '.join(RUNGS)}")
    return rung, arch or None


def _common_arch(one: Loaded, rungs: tuple[str, str]) -> str:
    """The first architecture that has both rungs for this spec; where none has, the one whose planner says why."""
    from attngen.plan import default_arch
    from attngen.plan.arch import ARCHES
    from attngen.plan.choose import rungs_for
    from attngen.spec.attention import HOPPER_RUNGS

    has: list[Arch] = [arch for arch in ARCHES.values() if set(rungs) <= set(rungs_for(one.spec, arch))]
    return has[0].name if has else default_arch(next((rung for rung in rungs if rung in HOPPER_RUNGS), None))
