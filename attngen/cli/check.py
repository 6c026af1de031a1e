"""`check`: kernels run on a device and compared with float64."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen.cli import options, specs
from attngen.cli.common import FAILED, OK, colored, device_named, emulated_by_default, is_terminal, kernel_title

if TYPE_CHECKING:
    from attngen.device.protocol import Device
    from attngen.inspect.checking import Checked, Kernel
    from attngen.language import Loaded
    from attngen.spec.attention import AttentionSpec


@click.command("check")
@options.spec
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:N, emulated, or auto: cuda if there is a GPU.")
@click.option("--kernel", type=options.SCHEDULES, help="One schedule.  [default: all that the architecture has for the spec]")
@click.option(
    "--backward/--forward",
    "backward",
    default=None,
    help="Check the gradients alone, or the forward alone.  [default: both, of the schedules that have a backward]",
)
@options.wanted
@options.deterministic
@click.option("--arch", help="Emulated device: the architecture to plan for.  [default: sm_80; for wgmma and hopper sm_90a]")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="The element type.  [default: the spec's own]")
@options.size("--batch", 0, "Batch size.  [default: 1 and 2]")
@options.size("--heads", 1, "Query heads, unless the spec states `heads`.  [default: 1 and 4]")
@options.size("--kv-heads", 1, "Key/value heads.  [default: --heads, or 1 and 2]")
@options.size("--q-len", 0, "Number of queries, for one problem.  [default: chosen, or --kv-len]")
@options.size("--kv-len", 0, "Number of keys, for one problem.  [default: chosen, or --q-len]")
@options.param
@click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="Size of a dimension that only inputs have.  [default: chosen for the index that reads it]",
)
@options.number("--seed", 0, "The seed of the random inputs.", 0)
@options.number("--thread-orders", 1, "Emulated device: number of different orders of threads to run.", 1)
@click.option("--fast", is_flag=True, help="Emulated device: do not check memory accesses.")
@click.option("--debug", is_flag=True, help="Emulated device: compile for gdb; see docs/trace.md.")
@options.source
@click.option(
    "--against",
    metavar="MODULE:FUNCTION",
    help="Compare the spec with your own attention instead: MODULE:FUNCTION or FILE.py:FUNCTION, or a file .npz.",
)
@click.option(
    "--layout",
    type=click.Choice(["bhsd", "bshd"]),
    help="With --against: axes of q, k, v: batch, heads, length, size, or batch, length, heads, size.  [default: what agrees]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON; docs/json.md lists the keys.")
def command(
    spec: str, device: str, kernel: str | None, backward: bool | None, wanted: str | None, deterministic: bool,
    arch: str | None, dtype: str | None, batch: int | None, heads: int | None, kv_heads: int | None, q_len: int | None,
    kv_len: int | None, given: tuple[str, ...], dims: tuple[str, ...], seed: int, thread_orders: int, fast: bool, debug: bool,
    source: Path | None, against: str | None, layout: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a spec's kernels, forward and backward, compare with numpy in float64, and print the errors.

    \b
    attngen check specs/gpt2.attn
    attngen check alibi --q-len 300 --heads 4
    attngen check specs/gpt2.attn --device emulated --thread-orders 3
    attngen check alibi --backward --wanted slopes    the gradient of the slopes alone
    attngen check gpt2 --source out/gpt2_fused.cu     a file of `attngen build` that you changed
    attngen check gpt2 --against model.py:attention   your own function

    All schedules are checked: naive, tiled and fused, and wgmma, hopper and decode if the spec supports them. On a GPU these
    are the schedules of its architecture. hopper runs with the tile that is planned for unknown lengths. A line "naive
    backward" checks the gradients of q, k and v and of all captured float tensors and params; its error is that of the
    gradient that is nearest to its limit. Schedules without such a line have no backward.

    Each schedule runs on about ten small problems. Lengths, params and captured tensors are chosen so that each condition of
    the mask and each term of the score changes a result, and so that a block meets every circumstance that it can meet: tiles
    that are skipped, full, partial, the only one or none at all, rows without keys, lengths of 0, buffers that are filled
    again, splits without keys, work tiles one after another, groups of heads, very large scores, rows that are not aligned.
    What no problem exercises is printed as "not exercised": a mistake there would not be found. With --q-len or --kv-len
    there is one problem, of these lengths. If a spec states many heads, four of them are computed. If the scale reads params,
    the kernels for positive scales are checked too, as a spec NAME_positive.

    With --against, no kernel runs: O and the gradients of the spec, in float64, are compared with those of your own attention.
    Your attention is a function or torch module of q, k and v (and of inputs and params that it takes by name), the functions
    of a score and a mask of FlexAttention, as FILE.py:score_mod,mask_mod, or arrays q, k, v and o in a file. The first element
    that differs is printed with its query, and with the key that explains the difference.

    The allowed error is twice that of the same computation in fp32 with its output rounded to the spec's type, as torch's math
    backend does it, plus one unit in the last place. The emulated device also reports races, missing barriers and
    out-of-bounds accesses.
    """
    from dataclasses import replace
    from itertools import chain

    if against is not None:
        options.refuse(
            "--against runs no kernel", "kernel", "backward", "wanted", "deterministic", "arch", "dtype", "dims",
            "thread_orders", "fast", "debug", "source",
        )  # fmt: skip
        _check_against(specs.load_specs(spec), against, given, as_json, device, layout, batch, heads, kv_heads, q_len,
                       kv_len, seed)  # fmt: skip
        return
    options.refuse("only --against has a layout", "layout")
    if backward is False:
        options.refuse("a forward has no gradients", "wanted", "deterministic")
    is_one_problem = q_len is not None or kv_len is not None
    if not is_one_problem:  # small problems: numpy's threads cost more than they save
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from attngen.inspect.checking import check_exercised
    from attngen.inspect.trial import Fixed
    from attngen.spec.dtypes import DTYPES
    from attngen.spec.scales import has_scale_forms, with_scale_form

    gpu = None if emulated_by_default(device) else device_named(device)
    arch = gpu.arch if gpu is not None else None if arch is None else specs.arch_known(arch).name
    loaded = specs.load_specs(spec)
    if dtype is not None:
        loaded = [replace(one, spec=replace(one.spec, dtype=DTYPES[dtype])) for one in loaded]
    stated = specs.Gradients(True, wanted, deterministic)
    chosen = specs.Chosen(loaded, kernel, arch, backward, stated).by_source(source)
    devices = _Devices(gpu, chosen.arch, thread_orders, fast, debug)
    progress = _Progress()
    checks = []  # planned before the first runs, so that a refusal is the only output
    for one in chosen.loaded:
        fixed = Fixed(batch, heads, kv_heads, q_len, kv_len, specs.known_params(one.spec, given), _sizes(one.spec, dims), seed)
        with specs.pointing_at(one), progress.cleared():
            kernels = devices.checked(one.spec, chosen)
            checks.append(check_exercised(one.spec, kernels, fixed, chosen.text, progress.show, may_fork=not is_one_problem))
            if has_scale_forms(one.spec) and source is None:  # what calls with a positive scale run
                positive = replace(with_scale_form(one.spec, "positive"), name=f"{one.spec.name}_positive")
                checks.append(check_exercised(positive, kernels, fixed, progress=progress.show))
    results = []
    table = None if as_json else _CheckTable()
    with specs.compilation_errors_in(chosen.changed), progress.cleared():
        for result in chain.from_iterable(checks):
            results.append(result)
            progress.clear()
            if table is not None:
                table.add(result)
    if table is None:
        click.echo(json.dumps([_check_json(r) for r in results], indent=2))
    else:
        table.finish()
    sys.exit(OK if all(r.comparison.passed for r in results) else FAILED)


def _check_against(
    loaded: list[Loaded], against: str, given: tuple[str, ...], as_json: bool, device: str, layout: str | None, *sizes: Any
) -> None:
    """The comparison with a user's own attention, by what the command line states."""
    from attngen.cli.against import check_against
    from attngen.inspect.against import Against

    batch, heads, kv_heads, q_len, kv_len, seed = sizes
    place = {"auto": None, "emulated": "cpu"}.get(device, device)
    stated = {
        one.spec.name: Against(batch, heads, kv_heads, q_len, kv_len, specs.known_params(one.spec, given), seed, layout, place)
        for one in loaded
    }
    check_against(loaded, against, stated, as_json)


def _sizes(spec: AttentionSpec, dims: tuple[str, ...]) -> dict[str, int]:
    """The values of --dim: sizes of dimensions that only the spec's inputs have."""
    sizes: dict[str, int] = {}
    for text in dims:
        name, _, size = text.partition("=")
        if not size.isdecimal():
            raise click.BadParameter(f"{text!r} is not NAME=SIZE", param_hint="--dim")
        if name not in spec.free_dims:
            known = ", ".join(spec.free_dims) or "none"
            raise click.BadParameter(f"{spec.name} has no dimension {name} of its own; it has {known}", param_hint="--dim")
        sizes[name] = int(size)
    return sizes


class _Devices:
    """The devices of a check: a GPU, or the emulated device for one architecture, once for each order of threads."""

    def __init__(self, gpu: Device | None, arch: str | None, thread_orders: int, fast: bool, debug: bool) -> None:
        self.gpu, self.arch, self.thread_orders, self.fast, self.debug = gpu, arch, thread_orders, fast, debug

    def kernels(self, spec: AttentionSpec, kernel: str | None) -> list[Kernel]:
        """Forwards: each schedule with each of its devices, `kernel`, or all schedules that support the spec."""
        from attngen.inspect.checking import Kernel

        schedules = (kernel,) if kernel is not None else self._schedules(spec)
        return [Kernel(schedule, device) for schedule in schedules for device in self._devices(spec, schedule)]

    def checked(self, spec: AttentionSpec, chosen: specs.Chosen) -> list[Kernel]:
        """What is checked: forwards, then backwards. A backward that a spec or a schedule has not is left out, unless it alone
        was asked for."""
        kernels = self.kernels(spec, chosen.kernel)
        found = [] if chosen.backward else [*kernels]
        if chosen.backward is not False:
            found += self._backwards(spec, kernels, chosen.gradients, must=chosen.backward is True)
        return found

    def _backwards(self, spec: AttentionSpec, kernels: list[Kernel], gradients: specs.Gradients, must: bool) -> list[Kernel]:
        from attngen.inspect.prepare import plan_for
        from attngen.plan import PlanRefusal
        from attngen.spec.gradient import QKV, GradientError

        found = []
        refusal: Exception | None = None
        for kernel in kernels:
            for wanted in (gradients.of(spec), *([] if gradients.wanted else [QKV])):  # all, or those that every backward has
                one = kernel._replace(wanted=wanted, deterministic=gradients.deterministic)
                try:
                    plan_for(spec, *one)
                except (PlanRefusal, GradientError) as error:
                    refusal = refusal or error
                    continue
                found.append(one)
                break
        if must and not found and refusal is not None:
            raise refusal
        return found

    def _schedules(self, spec: AttentionSpec) -> Sequence[str]:
        from attngen.keywords import PORTABLE_SCHEDULES
        from attngen.plan import ARCHES, PlanRefusal
        from attngen.schedules import choose, schedules_for

        own = spec.kernel.schedule
        arch = ARCHES[self.arch or "sm_90a"]
        schedules = []
        for schedule in dict.fromkeys((*schedules_for(spec, arch), *((own,) if own != "auto" else ()))):
            if schedule not in PORTABLE_SCHEDULES and schedule != own:
                try:
                    choose(spec, arch, schedule)
                except PlanRefusal:  # the tile that the spec states for `auto` fits fused only
                    continue
            schedules.append(schedule)
        return schedules or [own]  # none suits: the planner of the spec's own one says why

    def _devices(self, spec: AttentionSpec, schedule: str) -> list[Device]:
        if self.gpu is not None:
            return [self.gpu]
        from attngen.device.emulated import EmulatedDevice
        from attngen.plan import ARCHES
        from attngen.schedules import default_arch, schedules_for

        usual = default_arch(spec.kernel.schedule if schedule == "auto" else schedule)
        newest = schedule in schedules_for(spec, ARCHES["sm_90a"]) and schedule not in schedules_for(spec, ARCHES[usual])
        arch = self.arch or ("sm_90a" if newest else usual)  # decode with e4m3 needs sm_89 or later
        return [EmulatedDevice(not self.fast, order, arch, debug=self.debug) for order in range(self.thread_orders)]


class _Progress:
    """The current step, on one line of the terminal; nothing if stderr is not a terminal that can erase a line."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, what: str) -> None:
        if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
            click.echo(f"\r\x1b[2K{what} ...", nl=False, err=True)
            self.shown = True

    def clear(self) -> None:
        if self.shown:
            click.echo("\r\x1b[2K", nl=False, err=True)
            self.shown = False

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """A context that clears the line at its end, also after an exception."""
        try:
            yield
        finally:
            self.clear()


class _CheckTable:
    """A table that is printed line by line as results arrive."""

    def __init__(self) -> None:
        self.results: list[Checked] = []
        click.echo(
            f"{'attention':<20} {'kernel':<25} {'device':<10} {'error':>9} {'allowed':>9} {'lse':>9} {'compile':>8} {'run':>8}"
        )

    def add(self, r: Checked) -> None:
        self.results.append(r)
        c = r.comparison
        lse = "-" if c.lse_error is None else f"{c.lse_error:.2e}"
        verdict = click.style("ok", fg="green") if c.passed else click.style("FAILED", fg="red", bold=True)
        click.echo(
            f"{r.spec:<20} {kernel_title(r.schedule, r.template):<25} {r.device:<10} {c.error:>9.2e} "
            f"{c.allowed:>9.2e} {lse:>9} {r.compile_seconds:>7.2f}s {r.run_seconds:>7.2f}s  {verdict}",
            color=colored(sys.stdout),
        )
        for wrong in c.wrong:
            click.echo(f"    {wrong}")
        if not c.passed:
            click.echo(f"    {r.problem_text}")

    def finish(self) -> None:
        """Prints what was not exercised, and names the schedules if it is not all of them; and what no problem has."""
        for spec in dict.fromkeys(r.spec for r in self.results):
            results = [r for r in self.results if r.spec == spec]
            missed: dict[tuple[str, ...], list[str]] = {}
            for what in dict.fromkeys(what for r in results for what in r.not_exercised):
                missed.setdefault(tuple(dict.fromkeys(r.schedule for r in results if what in r.not_exercised)), []).append(what)
            for schedules, whats in missed.items():
                of = "" if len(schedules) == len({r.schedule for r in results}) else f", {', '.join(schedules)}"
                click.echo(f"{spec}{of}: not exercised, so that a mistake there is not seen:")
                for what in whats:
                    click.echo(f"    {what}")
            if absent := [*dict.fromkeys(what for r in results for what in r.absent)]:
                click.echo(f"{spec}: occurs in none of the problems tried, which are short:")
                for what in absent:
                    click.echo(f"    {what}")


def _check_json(r: Checked) -> dict[str, object]:
    from dataclasses import asdict

    found = asdict(r)
    return {"attention": found.pop("spec"), **found, "passed": r.comparison.passed}
