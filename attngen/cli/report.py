"""`report`: an HTML page about a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import check_writable, write_whole
from attngen.cli.specs import Gradients, arch_named, known_params, load_one_spec, source_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attngen.drawings.timeline import Timeline
    from attngen.inspect.checking import Checked
    from attngen.plan import Plan
    from attngen.spec.attention import AttentionSpec

CHECKED_LENGTH = 130  # rows and keys of the checked problem: one block and part of a second
NO_CHECK = "--no-check was given"
SHARE_OF_LINES = "{mapped} of {all} SASS instructions with a line of CUDA"


@click.command("report")
@options.spec
@options.file("-o", "--output", what="The file to write.  [default: ATTENTION_SCHEDULE.html]")
@options.kernel
@options.arch
@options.size("--q-len", 1, "Number of queries of the tile map and the roofline.", 1024)
@options.kv_len
@options.param
@options.gradients
@click.option(
    "--check/--no-check", default=True, show_default=True, help="Run on the emulated device, for the errors and the pipeline."
)
def command(
    spec: str, output: Path | None, kernel: str | None, arch: str | None, q_len: int, kv_len: int | None,
    given: tuple[str, ...], gradients: Gradients, check: bool,
) -> None:  # fmt: skip
    """Write an HTML page: spec, plan, CUDA, PTX and SASS side by side, each line linked to what it was compiled to.

    \b
    attngen report gpt2
    attngen report mistral_window --kernel hopper -o page.html
    attngen report gpt2 --arch sm_86 --q-len 8192
    attngen report alibi --backward --kernel naive

    The page is one file and needs no network. Below the code it shows the loop nest, the tile map, the banks of shared memory,
    the pipeline, the roofline, instructions by class, and errors. The command needs no GPU. It needs nvdisasm (`attngen doctor`
    says how to get it), and a C++ compiler for the pipeline and the errors.
    """
    from attngen.inspect.call import Call
    from attngen.inspect.prepare import check_call
    from attngen.inspect.report.page import report as page_about
    from attngen.inspect.report.pictures import plans_beside
    from attngen.inspect.work import check_countable
    from attngen.reference.problems import Shape

    loaded = load_one_spec(spec)
    target = arch_named(arch, kernel, [loaded])
    plan, source = source_of(loaded, target, kernel, gradients)
    params = known_params(loaded.spec, given)
    call = Call(loaded.spec, plan, q_len, kv_len or q_len, params)
    check_call(loaded.spec, Shape(1, q_len=call.q_len, kv_len=call.kv_len), params)
    for beside in plans_beside(loaded.spec, plan).values():
        check_countable(beside, call.problem)
    path = output or Path(f"{source.name}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)  # before anything is run
    errors = _errors(loaded.spec, plan, params) if check else NO_CHECK
    page = page_about(loaded, source, call, errors, _pipeline(loaded.spec, plan) if check else NO_CHECK)
    data = page.html.encode(errors="replace")  # a path may have bytes that are no text
    write_whole(path, data)
    if isinstance(errors, str):
        click.echo(f"no table of errors: {errors}", err=True)
    share = SHARE_OF_LINES.format(mapped=page.mapped, all=page.instructions)
    click.echo(f"{path}  {len(data) / 2**20:.2f} MiB  {share}")


def _pipeline(spec: AttentionSpec, plan: Plan) -> Timeline | str:
    """The pipeline of a traced run, or the reason why there is none."""
    from attngen.device.protocol import DeviceError
    from attngen.inspect.pipeline import traced_timeline

    try:
        return traced_timeline(spec, plan)
    except DeviceError as error:
        return str(error)


def _errors(spec: AttentionSpec, plan: Plan, params: Mapping[str, int | float]) -> list[Checked] | str:
    """The errors of every schedule, or the reason why there are none."""
    from attngen.device.emulated import EmulatedDevice
    from attngen.device.protocol import DeviceError
    from attngen.inspect.checking import check_spec
    from attngen.inspect.report.pictures import plans_beside
    from attngen.reference.problems import Shape

    device = EmulatedDevice(checked=False, arch=plan.arch.name)
    shape = Shape(1, 2, 2, CHECKED_LENGTH, CHECKED_LENGTH)
    try:
        beside, facts = tuple(plans_beside(spec, plan)), plan.facts
        return list(check_spec(spec, beside, (device,), shape, params, 0, None, facts.wanted, facts.deterministic))
    except DeviceError as error:
        return str(error)
