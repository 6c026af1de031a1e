"""`bench`: the speed of a spec's forward or backward beside its alternatives in torch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import click

from attngen.cli import options
from attngen.cli.common import check_writable, colored, kernel_title, whole_numbers, words, write_whole
from attngen.cli.specs import Gradients, arch_known, known_params, load_one_spec, load_specs
from attngen.keywords import PORTABLE_SCHEDULES, ScheduleName
from attngen.spec.dtypes import STORAGE_DTYPES

if TYPE_CHECKING:
    from attngen.bench.report import Measured, Report
    from attngen.spec.attention import AttentionSpec

INSTALL = "pip install 'attngen[bench]'"
ELSEWHERE = "`attngen check` compares the kernels with float64, and `attngen trace` counts more of them, without a GPU"


@click.command("bench")
@click.argument("spec", required=False)
@click.option(
    "--lengths", default="512,1024,2048,4096,8192,16384", show_default=True, help="Sequence lengths, separated by commas."
)
@click.option("--dtypes", help="Element types, separated by commas.  [default: the spec's own]")
@click.option("--head-dims", help="Head sizes, separated by commas.  [default: the spec's own]")
@click.option("--full", is_flag=True, help="Measure each case also without its mask.")
@options.tokens
@click.option(
    "--kernel",
    default=",".join((*PORTABLE_SCHEDULES, "auto")),
    show_default=True,
    help="Schedules, separated by commas; auto is the one selected for this GPU. naive and tiled run up to length 4096.",
)
@options.number("--rounds", 2, "Number of timings of each candidate.", 21)
@options.param
@options.gradients
@options.file("--json", "json_file", what="Write the results to this file.")
@options.file("--plot", what="Plot the results to this file: .png, .svg or .pdf.")
@click.option(
    "--from", "kept", type=click.Path(exists=True, path_type=Path), help="Read results from this file instead of measuring."
)
def command(
    spec: str | None, lengths: str, dtypes: str | None, head_dims: str | None, full: bool, tokens: int,
    kernel: str, rounds: int, given: tuple[str, ...], gradients: Gradients,
    json_file: Path | None, plot: Path | None, kept: Path | None,
) -> None:  # fmt: skip
    """Measure a spec on the GPU beside the alternatives in torch.

    \b
    attngen bench specs/gpt2.attn --json gpt2.json --plot gpt2.png
    attngen bench llama_gqa --lengths 1024,4096 --dtypes fp16,bf16 --full
    attngen bench gpt2 --kernel auto,fused --full --json gpt2.json
    attngen bench alibi --backward --wanted q,k,v,slopes
    attngen bench --from gpt2.json --plot gpt2.svg

    attngen's schedules are measured beside torch's backends and FlashAttention 3 and 4, if these are installed and support
    the spec, and beside FlexAttention with the spec's own mask and score. Times are medians by CUDA events, with the L2 cache
    flushed before each call. TFLOP/s count the pairs that the mask keeps. Shares are relative to the rates of a matrix
    product and of a copy in the same run. Errors are the largest against float64.

    With --backward, the backward is measured alone, without the forward whose results it reads. torch's backends (cuDNN's
    among them), FlashAttention and FlexAttention run by autograd, with the same wanted gradients and the same gradient of O.
    TFLOP/s then count five products for each pair, as FlashAttention's benchmarks do: Q K^T, dO V^T, P^T dO, dS^T Q and dS K.
    Each counts once, even if two kernels compute it; with equal head sizes that is 2.5 times the forward. Products that no
    wanted gradient needs are not counted. The error is that of the gradient that is furthest from float64, relative to its
    largest element.

    Without a GPU, operations and bytes of one small problem are counted on the emulated device instead; only --param,
    --backward and --wanted are then accepted.
    """
    from attngen.device.select import has_gpu

    if kept is not None:
        options.refuse("--from reads results and measures nothing", *_parameters_but("kept", "plot"))
        _require_packages(measures=False, plot=plot)
        report = _kept_report(kept)
        table = _BenchTable()
        for result in report.results:
            table.add(result)
    elif spec is None:
        raise click.UsageError("name the SPEC to measure, or read earlier results with --from FILE")
    elif not has_gpu():  # said before any other mistake: to correct those would lead to no timing
        _refuse_options_of_timings()
        _count(spec, given, gradients)
        return
    else:
        _check_lists(lengths, dtypes, head_dims, kernel)
        _require_packages(measures=True, plot=plot)
        one = load_one_spec(spec)
        if json_file is not None:
            check_writable(json_file)
        report = _measured(
            one.spec,
            lengths,
            dtypes,
            head_dims,
            full,
            tokens,
            kernel,
            rounds,
            known_params(one.spec, given),
            gradients,
            json_file,
        )
    click.echo(f"\n{report.what}; {report.where}; medians of {report.rounds} timings, in brackets the 10th and 90th percentile")
    if plot is not None:
        from attngen.bench.plot import draw

        draw(report, plot)
        click.echo(f"wrote {plot}", err=True)


def _refuse_options_of_timings() -> None:
    """Raises UsageError if the command line has an option that counts, made without a GPU, do not have."""
    refused = options.given(*_parameters_but("spec", "given", "backward", "wanted"))
    if refused:
        missing = [name for name in ("torch", "matplotlib") if find_spec(name) is None]
        more = f"; with one, {' and '.join(missing)} would be missing too: {INSTALL}" if missing else ""
        raise click.UsageError(
            "no GPU found, so nothing can be timed; operations and bytes of one small problem are counted instead "
            f"without {', '.join(refused)}{more}. {ELSEWHERE}"
        )


def _require_packages(measures: bool, plot: Path | None) -> None:
    """Raises UsageError for all packages that are missing, before anything is measured or read; ArgumentError for a plot of
    an unknown format, UsageError for one that cannot be written."""
    if plot is not None:
        from attngen.bench.plot import check_format

        check_format(plot)
    needed = {"torch": measures, "matplotlib": plot is not None}
    missing = [name for name, is_needed in needed.items() if is_needed and find_spec(name) is None]
    if missing:
        what = " and ".join(["measuring"] * ("torch" in missing) + ["a plot"] * ("matplotlib" in missing))
        raise click.UsageError(f"{what} {'need' if len(missing) > 1 else 'needs'} {' and '.join(missing)}: {INSTALL}")
    if plot is not None:
        check_writable(plot)


def _parameters_but(*names: str) -> list[str]:
    """All parameters of the command but those called `names`."""
    return [p.name for p in click.get_current_context().command.params if p.name is not None and p.name not in names]


def _check_lists(lengths: str, dtypes: str | None, head_dims: str | None, kernel: str) -> None:
    """Raises BadParameter for an unknown item of an option that is a list."""
    for option, numbers in (("--lengths", lengths), ("--head-dims", head_dims)):
        whole_numbers(numbers, option)
    known = {
        "--dtypes": ("element type", dtypes, [dtype.name for dtype in STORAGE_DTYPES]),
        "--kernel": ("schedule", kernel, get_args(ScheduleName)),
    }
    for option, (what, stated, names) in known.items():
        given = words(stated)
        for item in given or ([] if stated is None else [stated]):
            if item not in names:
                raise click.BadParameter(f"unknown {what} {item or '(no name)'}; known: {', '.join(names)}", param_hint=option)


def _measured(
    spec: AttentionSpec, lengths: str, dtypes: str | None, head_dims: str | None, full: bool, tokens: int,
    kernel: str, rounds: int, params: dict[str, int | float], gradients: Gradients, json_file: Path | None,
) -> Report:  # fmt: skip
    """The report of a sweep. Each result is printed and written to `json_file` as soon as it is measured."""
    from attngen.bench import sweep
    from attngen.bench.report import Report

    sizes = whole_numbers(lengths, "--lengths"), words(dtypes), whole_numbers(head_dims, "--head-dims")
    todo = list(sweep.cases(spec, *sizes, full, tokens))
    table, wanted = _BenchTable(), gradients.of(spec)
    report = Report(spec.name, sweep.where(), tokens, rounds, (), wanted)
    progress = partial(click.echo, err=True)
    schedules = cast("list[ScheduleName]", words(kernel))
    for result in sweep.run(todo, params, rounds, progress, schedules, wanted, gradients.deterministic):
        report = replace(report, results=(*report.results, result))
        table.add(result)
        if json_file is not None:
            write_whole(json_file, json.dumps(report.to_json(), indent=1).encode())
    return report


def _kept_report(path: Path) -> Report:
    from attngen.bench.report import from_json
    from attngen.device.arrays import ArgumentError

    try:
        return from_json(json.loads(path.read_text("utf-8")))
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not a JSON file ({error})") from error


class _BenchTable:
    """A table that is printed line by line: a heading for each case, its candidates below."""

    def __init__(self) -> None:
        self.case = ""

    def add(self, r: Measured) -> None:
        if r.case != self.case:
            self.case = r.case
            click.echo(click.style(f"\n{r.case}", bold=True), color=colored(sys.stdout))
            click.echo(
                f"  {'':<16} {'ms':>9} {'':<19} {'TFLOP/s':>8} {'of matmul':>10} {'of copy':>8} {'peak MiB':>9} {'error':>9}"
            )
        t = r.timing
        spread = f"({t.low:.3f} to {t.high:.3f})"
        line = (
            f"  {r.candidate:<16} {t.median:>9.3f} {spread:<19} {r.tflops:>8.1f} {r.of_matmul:>9.0%} "
            f"{r.of_copy:>8.0%} {r.peak_bytes / 2**20:>9.1f} {'-' if r.error is None else format(r.error, '.1e'):>9}"
        )
        click.echo(click.style(line, bold=r.candidate.startswith("attngen")), color=colored(sys.stdout))


def _count(spec: str, given: tuple[str, ...], gradients: Gradients) -> None:
    """Prints the counts of the emulated device."""
    click.echo(f"no GPU found, so nothing can be timed; these are exact counts of the emulated device. {ELSEWHERE}", err=True)

    from attngen.inspect.tracing import trace_spec
    from attngen.reference.problems import Shape
    from attngen.schedules import default_arch, schedules_for

    arch = arch_known(default_arch())
    for one in load_specs(spec):
        shape = Shape(batch=1, q_heads=2, kv_heads=2, q_len=256, kv_len=256)
        sizes, wanted = shape.sizes(one.spec), gradients.of(one.spec)
        width = 27 if wanted else 18
        of = f", gradients of {', '.join(wanted)}" if wanted else ""
        click.echo(
            f"{one.spec.name}{of}: batch 1, {sizes['q_heads']} query heads, length 256; bytes of every access, before any cache"
        )
        click.echo(
            f"  {'kernel':<{width}} {'global read':>12} {'written':>10} {'shared read':>12} {'written':>10} {'workspace':>10} "
            f"{'mma':>8} {'barriers':>9}"
        )
        schedules = [s for s in PORTABLE_SCHEDULES if s in schedules_for(one.spec, arch, wanted)]
        params = known_params(one.spec, given)
        for found in trace_spec(one.spec, schedules, arch.name, shape, params, watch=None, wanted=wanted):
            t = found.totals
            click.echo(
                f"  {kernel_title(found.schedule, found.plan.schedule.name):<{width}} {t.global_read:>12,} "
                f"{t.global_written:>10,} {t.shared_read:>12,} {t.shared_written:>10,} {found.workspace:>10,} "
                f"{t.mma:>8,} {t.barriers:>9,}"
            )
