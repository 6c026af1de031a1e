"""`diff`: two schedules of a spec side by side."""

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
@click.argument("left", metavar="SCHEDULE[@ARCH]")
@click.argument("right", metavar="SCHEDULE[@ARCH]")
@click.option("--arch", help="One architecture for both.  [default: the oldest that has both schedules]")
@name_option
@comments_option
@click.option(
    "--context", type=click.IntRange(0), default=3, show_default=True, help="Number of unchanged lines around each change."
)
@click.option("--full", is_flag=True, help="Print every line, changed or not.")
@click.option(
    "--width", type=click.IntRange(20), help="Width in columns; below 120, one file below the other.  [default: the terminal's]"
)
@click.option("--json", "as_json", is_flag=True, help="Print only the counts of lines, as JSON.")
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
    """Show what changes from one schedule to another, side by side.

    \b
    attngen diff gpt2 naive tiled                tiles in shared memory, sums in registers
    attngen diff gpt2 tiled fused                no S in memory: the online softmax
    attngen diff gpt2 fused@sm_75 fused@sm_80    tensor cores, asynchronous copies
    attngen diff gpt2 fused wgmma                TMA, warpgroup matrix products
    attngen diff gpt2 wgmma hopper               warp specialization, a persistent kernel

    The default architecture is the oldest that has both schedules. For tiled and fused this is sm_75, where both multiply on
    the ordinary arithmetic units, so that only the fusion differs.

    The last lines give the part of the shorter file that is kept. Lines are compared without indentation and without blank
    lines. Unchanged lines are in both files, in the same order. Moved lines are runs of at least three other lines that occur
    elsewhere in the other file; each run is shown as a numbered block. The second figure counts code without comments.
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
    return f"{source.name}, template {plan.schedule}, for {plan.arch.name} ({plan.arch.what})"


def _elsewhere(spec: str, one: Loaded, plan: Plan) -> str:
    """The next step to look at, if the default architecture uses another template for this schedule."""
    from attngen.plan import default_arch

    (usual,) = arches_named(default_arch(plan.rung), plan.rung, [one])
    schedule = source_of(one, usual, plan.rung)[0].schedule
    if schedule == plan.schedule:
        return ""
    step = f"attngen diff {spec} {plan.rung}@{plan.arch.name} {plan.rung}@{usual.name}"
    return f"on {usual.name}, {plan.rung} uses the template {schedule}: {step}\n"


def _sides(
    one: Loaded, left: str, right: str, arch: str | None, comments: Comments
) -> tuple[tuple[Plan, KernelSource], tuple[Plan, KernelSource]]:
    """Both files. Raises BadParameter if they are the same file, or no schedule has such a name."""
    sides = (_side(left), _side(right))
    common = _common_arch(one, (sides[0][0], sides[1][0]))
    (rung, target), (other, other_target) = (
        (rung, arches_named(named or arch or common, rung, [one])[0]) for rung, named in sides
    )
    if (rung, target) == (other, other_target):
        raise click.BadParameter(
            f"both sides are {rung} for {target.name}; name two schedules, or two architectures as in fused@sm_80"
        )
    return source_of(one, target, rung, comments), source_of(one, other_target, other, comments)


def _side(text: str) -> tuple[str, str | None]:
    rung, _, arch = text.partition("@")
    if rung not in RUNGS:
        raise click.BadParameter(f"unknown schedule {rung}; known: {', '.join(RUNGS)}")
    return rung, arch or None


def _common_arch(one: Loaded, rungs: tuple[str, str]) -> str:
    """The first architecture that has both rungs for this spec; where none has, the one whose planner says why."""
    from attngen.plan import default_arch
    from attngen.plan.arch import ARCHES
    from attngen.plan.choose import rungs_for
    from attngen.spec.attention import HOPPER_RUNGS

    has: list[Arch] = [arch for arch in ARCHES.values() if set(rungs) <= set(rungs_for(one.spec, arch))]
    return has[0].name if has else default_arch(next((rung for rung in rungs if rung in HOPPER_RUNGS), None))
