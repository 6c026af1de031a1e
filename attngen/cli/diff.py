"""`diff`: two schedules of a spec side by side."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import colored
from attngen.cli.specs import FORWARD, Gradients, arch_named, load_specs, source_of

if TYPE_CHECKING:
    from attngen.emit.comments import Comments
    from attngen.emit.program import Program
    from attngen.inspect.diff import Comparison
    from attngen.language import Loaded
    from attngen.plan import Plan
    from attngen.plan.arch import Arch


@click.command("diff")
@options.spec
@click.argument("left", metavar="SCHEDULE[@ARCH]")
@click.argument("right", metavar="SCHEDULE[@ARCH]")
@click.option("--arch", help="One architecture for both.  [default: the oldest that has both schedules]")
@options.gradients
@options.comments
@options.number("--context", 0, "Number of unchanged lines around each change.", 3)
@click.option("--full", is_flag=True, help="Print every line, changed or not.")
@options.number("--width", 20, "Width in columns; below 120, one file below the other.  [default: the terminal's]")
@click.option("--json", "as_json", is_flag=True, help="Print only the counts of lines, as JSON.")
def command(
    spec: str, left: str, right: str, arch: str | None, gradients: Gradients, comments: Comments,
    context: int, full: bool, width: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what changes from one schedule to another, side by side.

    \b
    attngen diff gpt2 naive tiled                tiles in shared memory, sums in registers
    attngen diff gpt2 tiled fused                no S in memory: the online softmax
    attngen diff gpt2 fused@sm_75 fused@sm_80    tensor cores, asynchronous copies
    attngen diff gpt2 fused wgmma                TMA, warpgroup matrix products
    attngen diff gpt2 wgmma hopper               warp specialization, a persistent kernel
    attngen diff gpt2 naive naive_backward       what gradients add to a forward
    attngen diff gpt2 naive tiled --backward     the backwards of two schedules
    attngen diff gpt2 hopper hopper --backward --deterministic    left: the same bits in every run; right: not

    The default architecture is the oldest that has both schedules. For tiled and fused this is sm_75, where both multiply on
    the ordinary arithmetic units, so that only the fusion differs.

    The last lines give the part of the shorter file that is kept. Lines are compared without indentation and without blank
    lines. Unchanged lines are in both files, in the same order. Moved lines are runs of at least three other lines that occur
    elsewhere in the other file; each run is shown as a numbered block. The second figure counts code without comments.
    """
    if as_json:
        options.refuse("--json prints the counts alone", "context", "full", "width")
    if full:
        options.refuse("--full prints every line", "context")
    if "@" in left and "@" in right:
        options.refuse("both sides name their architecture", "arch")
    from attngen.inspect.diff_text import diff_text, summary

    numbers = []
    for one in load_specs(spec):
        (plan, source), (other_plan, other) = _sides(one, left, right, arch, comments, gradients)
        compared, code = _compared(source, other)
        numbers.append({"attention": one.spec.name, "lines": _numbers(compared), "code": _numbers(code)})
        if as_json:
            continue
        titles = _title(source, plan), _title(other, other_plan)
        columns = width or shutil.get_terminal_size().columns
        click.echo(diff_text(compared, titles, columns, None if full else context, colored(sys.stdout)))
        click.echo(summary(compared, "lines of the shorter file"))
        click.echo(summary(code, "lines of its code"))
        if plan.keyword != other_plan.keyword:
            click.echo("".join(_elsewhere(spec, one, side) for side in (plan, other_plan)), nl=False)
    if as_json:
        click.echo(json.dumps(numbers))


def _compared(left: Program, right: Program) -> tuple[Comparison, Comparison]:
    """The comparison of two files, and that of their code without comments."""
    from attngen.emit.comments import strip_comments
    from attngen.inspect.diff import compare

    return compare(left.text, right.text), compare(strip_comments(left.text), strip_comments(right.text))


def _numbers(compared: Comparison) -> dict[str, float]:
    return {"lines": compared.lines, "unchanged": compared.unchanged, "moved": compared.moved, "kept": compared.kept}


def _title(source: Program, plan: Plan) -> str:
    return f"{source.name}, template {plan.schedule.name}, for {plan.arch.name} ({plan.arch.what})"


def _elsewhere(spec: str, one: Loaded, plan: Plan) -> str:
    """A hint at the next comparison, if the default architecture uses another template for this schedule."""
    from attngen.schedules import default_arch

    usual = arch_named(default_arch(plan.keyword), plan.keyword, [one])
    gradients = Gradients(True, ",".join(plan.wanted)) if plan.wanted else FORWARD
    other = source_of(one, usual, plan.keyword, gradients)[0].schedule
    if other is plan.schedule:
        return ""
    step = f"attngen diff {spec} {plan.keyword}@{plan.arch.name} {plan.keyword}@{usual.name}"
    return f"on {usual.name}, {plan.keyword} uses the template {other.name}: {step}\n"


def _sides(
    one: Loaded, left: str, right: str, arch: str | None, comments: Comments, gradients: Gradients
) -> tuple[tuple[Plan, Program], tuple[Plan, Program]]:
    """Both files. Raises BadParameter if they are the same file, or if no schedule has the name."""
    sides = (_side(left, gradients.backward), _side(right, gradients.backward))
    common = _common_arch(one, (sides[0][0], sides[1][0]))
    arches = (next(a for a in (named, arch, common) if a is not None) for _, named, _ in sides)
    (first, second) = (
        (schedule, arch_named(target, schedule, [one]), is_backward)
        for target, (schedule, _, is_backward) in zip(arches, sides, strict=True)
    )
    one_side = first == second and gradients.deterministic  # the left alone
    if first == second and not one_side:
        raise click.BadParameter(
            f"both sides are {first[0]} for {first[1].name}; name two schedules, or two architectures as in fused@sm_80"
        )
    if not (first[2] or second[2]):
        gradients.of(one.spec)  # refuses what only backwards have

    def built(schedule: str, target: Arch, is_backward: bool, deterministic: bool) -> tuple[Plan, Program]:
        of_side = Gradients(True, gradients.wanted, deterministic) if is_backward else FORWARD
        return source_of(one, target, schedule, of_side, comments)

    return built(*first, gradients.deterministic), built(*second, gradients.deterministic and not one_side)


def _side(text: str, backward: bool) -> tuple[str, str | None, bool]:
    """Schedule, architecture if one is named, and whether it is the backward: by --backward, or named as naive_backward."""
    name, at, arch = text.partition("@")
    from attngen.keywords import SCHEDULE_NAMES
    from attngen.plan.plan import BACKWARD_SUFFIX

    schedule = name.removesuffix(BACKWARD_SUFFIX)
    if schedule not in SCHEDULE_NAMES:
        raise click.BadParameter(f"unknown schedule {schedule}; known: {', '.join(SCHEDULE_NAMES)}")
    return schedule, arch if at else None, backward or name != schedule


def _common_arch(one: Loaded, schedules: tuple[str, str]) -> str:
    """The first architecture that supports both schedules for this spec; if there is none, one whose planner says why."""
    from attngen.plan.arch import ARCHES
    from attngen.schedules import default_arch, schedules_for

    has: list[Arch] = [arch for arch in ARCHES.values() if set(schedules) <= set(schedules_for(one.spec, arch))]
    return has[0].name if has else default_arch(*schedules)
