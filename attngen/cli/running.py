"""`check`: a spec run on a device, and compared with the oracle."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen.cli.common import (
    EPILOG,
    FAILED,
    OK,
    RUNG_CHOICE,
    arch_known,
    colored,
    compiled_from,
    device_named,
    emulated_by_default,
    guarded,
    held_by,
    known_params,
    load_specs,
    name_option,
    param_option,
    pointing_at,
    source_option,
    spec_argument,
)

if TYPE_CHECKING:
    from attngen.device.protocol import Device
    from attngen.inspect.checking import Checked
    from attngen.spec.attention import AttentionSpec


@click.command(epilog=EPILOG)
@spec_argument
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:N, emulated, or auto: cuda if there is a GPU.")
@click.option("--kernel", type=RUNG_CHOICE, help="One schedule.  [default: all that the architecture has for the spec]")
@click.option(
    "--arch",
    help="Emulated device: the architecture to plan for.  [default: sm_80; for wgmma and hopper sm_90a]",
)
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="The element type.  [default: the spec's own]")
@click.option("--batch", type=click.IntRange(0), help="Batch size.  [default: 1 and 2]")
@click.option("--heads", type=click.IntRange(1), help="Query heads, unless the spec states `heads`.  [default: 2 and 4]")
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads.  [default: --heads, or 1 and 2]")
@click.option("--q-len", type=click.IntRange(0), help="Number of queries, for one problem.  [default: chosen, or --kv-len]")
@click.option("--kv-len", type=click.IntRange(0), help="Number of keys, for one problem.  [default: chosen, or --q-len]")
@param_option
@click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="Size of a dimension that only inputs have.  [default: by its index]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of the random inputs.")
@click.option(
    "--thread-orders",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Emulated device: number of different orders of threads to run.",
)
@click.option("--fast", is_flag=True, help="Emulated device: do not watch memory accesses.")
@click.option("--debug", is_flag=True, help="Emulated device: compile for gdb; see docs/trace.md.")
@source_option
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, with the sizes and params of each problem.")
@guarded
def check(
    spec: str, device: str, kernel: str | None, arch: str | None, dtype: str | None, batch: int | None, heads: int | None,
    kv_heads: int | None, q_len: int | None, kv_len: int | None, given: tuple[str, ...], dims: tuple[str, ...], seed: int,
    thread_orders: int, fast: bool, debug: bool, source: Path | None, name: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a spec's kernels, compare with numpy in float64, and print the errors.

    \b
    attngen check specs/gpt2.attn
    attngen check alibi --q-len 300 --heads 4
    attngen check specs/gpt2.attn --device emulated --thread-orders 3
    attngen check gpt2 --source out/gpt2_fused.cu     a file of `attngen build` that you changed

    All schedules are checked: naive, tiled and fused, and wgmma and hopper if the spec supports them. On a GPU they are those
    of its architecture. hopper runs with the tile that is planned for unknown lengths.

    Each schedule runs on two to four small problems. Lengths, params and captured tensors are chosen so that each condition
    of the mask and each term of the score changes a result, and so that skipped, full and partial tiles, rows and keys that
    do not fill a tile, several batches, heads and groups of heads, and q_len != kv_len occur. What no problem exercises is
    printed as "not exercised": an error there is not found. With --q-len or --kv-len there is one problem, of these lengths.

    The allowed error is twice that of the same computation in fp32 with its output rounded to the spec's type, as torch's math
    backend does it, plus one unit in the last place. The emulated device also reports races, missing barriers and
    out-of-bounds accesses.
    """
    from dataclasses import replace
    from itertools import chain

    if q_len is None and kv_len is None:  # numpy's threads cost small problems more than they give, above all on a busy machine
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from attngen.inspect.checking import check_exercised
    from attngen.inspect.trials import Fixed
    from attngen.spec.dtypes import DTYPES

    place = None if emulated_by_default(device) else device_named(device)
    arch = place.arch if place is not None else None if arch is None else arch_known(arch).name
    loaded = load_specs(spec, name)
    if dtype is not None:
        loaded = [replace(one, spec=replace(one.spec, dtype=DTYPES[dtype])) for one in loaded]
    loaded, held = held_by(source, loaded, kernel, arch)
    kernel, arch = (held.rung, held.arch.name) if held is not None else (kernel, arch)
    where = _Where(place, arch, thread_orders, fast, debug)
    progress = _Progress()
    checks = []  # all are planned before the first is run: a refusal comes alone
    for one in loaded:
        fixed = Fixed(batch, heads, kv_heads, q_len, kv_len, known_params(one.spec, given), _sizes(one.spec, dims), seed)
        with pointing_at(one), progress.cleared():
            kernels = where.kernels(one.spec, kernel)
            checks.append(check_exercised(one.spec, kernels, fixed, held.text if held else None, progress.show))
    results = []
    table = None if as_json else _CheckTable()
    with compiled_from(held), progress.cleared():
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


def _sizes(spec: AttentionSpec, dims: tuple[str, ...]) -> dict[str, int]:
    """The sizes of --dim, of dimensions that the spec's inputs have for themselves."""
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


class _Where:
    """The devices of a check: a GPU, or the emulated device for an architecture and for several orders of threads."""

    def __init__(self, gpu: Device | None, arch: str | None, thread_orders: int, fast: bool, debug: bool) -> None:
        self.gpu, self.arch, self.thread_orders, self.fast, self.debug = gpu, arch, thread_orders, fast, debug

    def kernels(self, spec: AttentionSpec, kernel: str | None) -> list[tuple[str, Device]]:
        """Each rung, `kernel` or all that the spec can have, with each of its devices."""
        rungs = (kernel,) if kernel is not None else self._rungs(spec)
        return [(rung, device) for rung in rungs for device in self._devices(spec, rung)]

    def _rungs(self, spec: AttentionSpec) -> Sequence[str]:
        from attngen.plan import PlanRefusal, choose, find_arch, rungs_for
        from attngen.spec.attention import HOPPER_RUNGS

        own = spec.schedule.rung
        arch = find_arch(self.arch or "sm_90a")
        assert arch is not None
        rungs = []
        for rung in dict.fromkeys((*rungs_for(spec, arch), *((own,) if own != "auto" else ()))):
            if rung in HOPPER_RUNGS and rung != own:
                try:
                    choose(spec, arch, rung)
                except PlanRefusal:  # the tile that the spec asks of `auto` is for fused
                    continue
            rungs.append(rung)
        return rungs

    def _devices(self, spec: AttentionSpec, rung: str) -> list[Device]:
        if self.gpu is not None:
            return [self.gpu]
        from attngen.device.emulated import EmulatedDevice
        from attngen.plan import default_arch

        arch = self.arch or default_arch(spec.schedule.rung if rung == "auto" else rung)
        return [EmulatedDevice(not self.fast, order, arch, debug=self.debug) for order in range(self.thread_orders)]


class _Progress:
    """What is done next, on one line of a terminal; nothing if standard error is no terminal, or one that only prints."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, what: str) -> None:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            click.echo(f"\r\x1b[2K{what} ...", nl=False, err=True)
            self.shown = True

    def clear(self) -> None:
        if self.shown:
            click.echo("\r\x1b[2K", nl=False, err=True)
            self.shown = False

    def cleared(self) -> Any:
        """A context after which the line is empty, whatever was raised."""
        from contextlib import ExitStack

        stack = ExitStack()
        stack.callback(self.clear)
        return stack


class _CheckTable:
    """Results as they come, a line each: long checks show their progress."""

    def __init__(self) -> None:
        self.results: list[Checked] = []
        click.echo(
            f"{'attention':<20} {'kernel':<20} {'device':<10} {'error':>9} {'allowed':>9} {'lse':>9} {'compile':>8} {'run':>8}"
        )

    def add(self, r: Checked) -> None:
        self.results.append(r)
        c = r.comparison
        lse = "-" if c.lse_error is None else f"{c.lse_error:.2e}"
        verdict = click.style("ok", fg="green") if c.passed else click.style("FAILED", fg="red", bold=True)
        click.echo(
            f"{r.spec:<20} {r.rung + (' ' + r.schedule if r.schedule != r.rung else ''):<20} {r.device:<10} {c.error:>9.2e} "
            f"{c.allowed:>9.2e} {lse:>9} {r.compile_seconds:>7.2f}s {r.run_seconds:>7.2f}s  {verdict}",
            color=colored(sys.stdout),
        )
        for wrong in c.wrong:
            click.echo(f"    {wrong}")
        if not c.passed:
            click.echo(f"    {r.problem_text}")

    def finish(self) -> None:
        """What was not exercised, with the rungs that it is said of if these are not all."""
        for spec in dict.fromkeys(r.spec for r in self.results):
            results = [r for r in self.results if r.spec == spec]
            missed: dict[tuple[str, ...], list[str]] = {}
            for what in dict.fromkeys(what for r in results for what in r.not_exercised):
                missed.setdefault(tuple(dict.fromkeys(r.rung for r in results if what in r.not_exercised)), []).append(what)
            for rungs, whats in missed.items():
                of = "" if len(rungs) == len({r.rung for r in results}) else f", {', '.join(rungs)}"
                click.echo(f"{spec}{of}: not exercised: {'; '.join(whats)}")


def _check_json(r: Checked) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(r) | {"passed": r.comparison.passed}
