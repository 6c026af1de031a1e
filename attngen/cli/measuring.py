"""`bench` and `tune`: measure a spec beside its alternatives, or its tile sizes beside each other."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import click

from attngen.cli.common import (
    EPILOG,
    colored,
    guarded,
    known_params,
    load_specs,
    name_option,
    one_name_option,
    param_option,
)
from attngen.spec.attention import RUNGS, Rung


@click.command(epilog=EPILOG)
@click.argument("spec", required=False)
@click.option(
    "--lengths", default="512,1024,2048,4096,8192,16384", show_default=True, help="Sequence lengths, separated by commas."
)
@click.option("--dtypes", help="Element types, separated by commas.  [default: the spec's own]")
@click.option("--head-dims", help="Head sizes, separated by commas.  [default: the spec's own]")
@click.option("--full", is_flag=True, help="Measure each case also without its mask.")
@click.option(
    "--tokens", type=click.IntRange(1), default=16384, show_default=True, help="Batch times length: the batch follows from it."
)
@click.option(
    "--kernel",
    default=",".join((*RUNGS, "auto")),
    show_default=True,
    help="Schedules, separated by commas; auto is the one selected for this GPU. naive and tiled run up to length 4096.",
)
@click.option("--rounds", type=click.IntRange(2), default=21, show_default=True, help="Number of timings of each candidate.")
@param_option
@name_option
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this file.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Plot the results to this file: .png, .svg or .pdf."
)
@click.option(
    "--from", "kept", type=click.Path(exists=True, path_type=Path), help="Read results from this file instead of measuring."
)
@guarded
def bench(
    spec: str | None, lengths: str, dtypes: str | None, head_dims: str | None, full: bool, tokens: int,
    kernel: str, rounds: int, given: tuple[str, ...], name: str | None,
    json_file: Path | None, plot: Path | None, kept: Path | None,
) -> None:  # fmt: skip
    """Measure a spec on the GPU beside the alternatives in torch.

    \b
    attngen bench specs/gpt2.attn --json gpt2.json --plot gpt2.png
    attngen bench llama_gqa --lengths 1024,4096 --dtypes fp16,bf16 --full
    attngen bench gpt2 --kernel auto,fused --full --json gpt2.json
    attngen bench --from gpt2.json --plot gpt2.svg

    attngen's schedules are measured beside torch's backends and FlashAttention 3 and 4, if these are installed and support
    the spec, and beside FlexAttention with the spec's own mask and score. Times are medians by CUDA events, with the L2 cache
    flushed before each call. TFLOP/s count the pairs that the mask keeps. Shares are of a matrix product and a copy measured
    in the same run. Errors are the largest against float64.

    Without a GPU, operations and bytes are counted on the emulated device instead.
    """
    from attngen.device.choose import has_gpu

    if plot is not None:
        from attngen.bench.plot import check_drawable

        check_drawable(plot)  # before anything is measured
    if kept is not None:
        report = _kept_report(kept)
        table = _BenchTable()
        for result in report.results:
            table.add(result)
    elif spec is None:
        raise click.UsageError("name the SPEC to measure, or read earlier results with --from FILE")
    elif not has_gpu():
        if json_file is not None or plot is not None:
            raise click.UsageError(
                "no GPU found, so nothing can be timed; without --json and --plot, operations and bytes are counted instead"
            )
        _count(spec, name, given)
        return
    else:
        (one,) = _single(spec, name)
        report = _measured(
            one.spec, lengths, dtypes, head_dims, full, tokens, kernel, rounds, known_params(one.spec, given), json_file
        )
    click.echo(f"\n{report.where}; medians of {report.rounds} timings, in brackets the 10th and 90th percentile")
    if plot is not None:
        from attngen.bench.plot import draw

        draw(report, plot)
        click.echo(f"wrote {plot}", err=True)


@click.command(epilog=EPILOG)
@click.argument("spec")
@click.option("--lengths", default="512,2048,8192", show_default=True, help="Sequence lengths, separated by commas.")
@click.option(
    "--tokens", type=click.IntRange(1), default=16384, show_default=True, help="Batch times length: the batch follows from it."
)
@click.option("--rounds", type=click.IntRange(2), default=21, show_default=True, help="Number of timings of each finalist.")
@param_option
@one_name_option
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON; docs/json.md lists the keys.")
@guarded
def tune(spec: str, lengths: str, tokens: int, rounds: int, given: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """Time the tile sizes, stages and warps that fit a spec on the GPU, and remember the fastest.

    \b
    attngen tune specs/gpt2.attn
    attngen tune llama_gqa --lengths 4096 --tokens 4096

    All combinations that fit registers and shared memory, by the planner's model, are compiled and timed; the best are timed
    again, for longer. The winner is kept on disk for this spec, this architecture and these sizes, rounded up to powers of 2
    (of the keys, and of the rows of all heads and batches). `attngen.compile` then uses it for calls of such sizes. A spec that
    states `tile`, `stages` or `warps` itself cannot be tuned. `attngen cache list --kind tuned` lists the winners.
    """
    from attngen.device.choose import has_gpu
    from attngen.device.protocol import DeviceError
    from attngen.device.tuned import is_open

    (one,) = _single(spec, name)
    if not has_gpu():
        raise DeviceError("tuning needs a GPU, and none was found; `attngen explain` shows the tile that the planner chooses")
    try:
        from attngen.bench import sweep, tune
    except ImportError as error:
        raise click.UsageError("tuning needs torch: pip install torch") from error
    if not is_open(one.spec):
        raise click.UsageError(f"{one.spec.name} states its own kernel, tile, stages or warps: nothing is left to tune")
    todo = list(sweep.cases(one.spec, _whole(lengths), [], [], False, tokens))
    outcomes = []
    for number, case in enumerate(todo, 1):
        place = f"[{number}/{len(todo)}]"
        if not as_json:
            click.echo(click.style(f"{case.title}", bold=True), color=colored(sys.stdout))
        found = tune.tune(case, known_params(one.spec, given), rounds, partial(_progress, place))
        outcomes.append({"case": case.title, **found.to_json()})
        if not as_json:
            _show_outcome(found)
    if as_json:
        click.echo(json.dumps({"attention": one.spec.name, "cases": outcomes}, indent=2))


def _show_outcome(found: Any) -> None:
    planned = next(t for t in found.tried if t.planned)
    for t in found.tried:
        marks = ", ".join(
            (*(["planned"] if t.planned else []), *(["remembered"] if t.schedule == found.winner.schedule else []))
        )
        speed = planned.timing.median / t.timing.median
        line = f"  {t.title:<30} {t.timing.median:>8.3f} ms  x{speed:.2f}  {marks}".rstrip()
        click.echo(click.style(line, bold="remembered" in marks), color=colored(sys.stdout))
    click.echo(f"  the best of {found.of}" + ("" if found.kept else "; it could not be written to the cache"))


def _progress(place: str, text: str) -> None:
    click.echo(f"{place} {text}", err=True)


def _single(spec: str, name: str | None) -> list[Any]:
    """The one attention of SPEC."""
    loaded = load_specs(spec, name)
    if len(loaded) > 1:
        raise click.UsageError(
            f"{spec} defines several attentions; choose one with --name: {', '.join(o.spec.name for o in loaded)}"
        )
    return loaded


def _measured(
    spec: Any, lengths: str, dtypes: str | None, head_dims: str | None, full: bool, tokens: int,
    kernel: str, rounds: int, params: dict[str, int | float], json_file: Path | None,
) -> Any:  # fmt: skip
    """The sweep's report, its table printed as it comes; what was measured is kept in `json_file`, whatever comes."""
    try:
        from attngen.bench import sweep
    except ImportError as error:
        raise click.UsageError("measuring needs torch: pip install torch") from error
    from attngen.bench.report import Report
    from attngen.spec.dtypes import DTYPES

    elements = _words(dtypes)
    for element in elements:
        if element not in DTYPES:
            raise click.BadParameter(f"unknown element type {element}; known: {', '.join(DTYPES)}", param_hint="--dtypes")
    rungs = _words(kernel)
    for rung in rungs:
        if rung not in get_args(Rung):
            raise click.BadParameter(f"unknown schedule {rung}; known: {', '.join(get_args(Rung))}", param_hint="--kernel")
    todo = list(sweep.cases(spec, _whole(lengths), elements, _whole(head_dims), full, tokens))
    table = _BenchTable()
    report = Report(spec.name, sweep.where(), tokens, rounds, ())
    for result in sweep.run(todo, params, rounds, lambda text: click.echo(text, err=True), cast("list[Rung]", rungs)):
        report = replace(report, results=(*report.results, result))
        table.add(result)
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_json(), indent=1))
    return report


def _kept_report(path: Path) -> Any:
    from attngen.bench.report import from_json
    from attngen.device.arrays import ArgumentError

    try:
        return from_json(json.loads(path.read_text()))
    except ValueError as error:
        raise ArgumentError(f"{path} is not a JSON file ({error})") from error


def _words(text: str | None) -> list[str]:
    return [w.strip() for w in text.split(",")] if text else []


def _whole(text: str | None) -> list[int]:
    words = _words(text)
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{text!r} is not a list of positive whole numbers separated by commas")
    return [int(word) for word in words]


class _BenchTable:
    """Results as they come: a heading for each case, the candidates under it."""

    def __init__(self) -> None:
        self.case = ""

    def add(self, r: Any) -> None:
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


def _count(spec: str, name: str | None, given: tuple[str, ...]) -> None:
    """What can be said without a GPU."""
    from attngen.bench.counts import count
    from attngen.reference.problems import Shape

    click.echo("no GPU found, so nothing can be timed; these are exact counts of the emulated device", err=True)
    for one in load_specs(spec, name):
        shape = Shape(batch=1, q_heads=2, kv_heads=2, q_len=256, kv_len=256)
        sizes = shape.sizes(one.spec)
        click.echo(
            f"{one.spec.name}: batch 1, {sizes['q_heads']} query heads, length 256; bytes of every access, before any cache"
        )
        click.echo(
            f"  {'kernel':<18} {'global read':>12} {'written':>10} {'shared read':>12} {'written':>10} {'workspace':>10} "
            f"{'mma':>8} {'barriers':>9}"
        )
        for c in count(one.spec, shape, known_params(one.spec, given)):
            title = c.rung + (f" {c.schedule}" if c.schedule != c.rung else "")
            click.echo(
                f"  {title:<18} {c.global_read:>12,} {c.global_written:>10,} {c.shared_read:>12,} {c.shared_written:>10,} "
                f"{c.workspace:>10,} {c.tensor_core_instructions:>8,} {c.barriers:>9,}"
            )
