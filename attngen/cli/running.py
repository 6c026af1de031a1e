"""`check`: a spec run on a device, and compared with the oracle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from attngen.cli.common import (
    EPILOG,
    FAILED,
    OK,
    RUNG_CHOICE,
    colored,
    devices_named,
    guarded,
    known_params,
    load_specs,
    name_option,
    param_option,
    pointing_at,
    rung_asked,
    rung_of_text,
    rungs_named,
    source_option,
    spec_argument,
)


@click.command(epilog=EPILOG)
@spec_argument
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:N, emulated, or auto: cuda if there is a GPU.")
@click.option("--kernel", type=RUNG_CHOICE, help="One schedule.  [default: naive, tiled and fused, and the spec's own]")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="The element type.  [default: the spec's own]")
@click.option("--batch", type=click.IntRange(0), default=1, show_default=True, help="Batch size.")
@click.option(
    "--heads",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Query heads, unless the spec states `heads`.",
)
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads.  [default: --heads]")
@click.option("--q-len", type=click.IntRange(0), default=200, show_default=True, help="Number of queries.")
@click.option("--kv-len", type=click.IntRange(0), help="Number of keys.  [default: --q-len]")
@param_option
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
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@guarded
def check(
    spec: str, device: str, kernel: str | None, dtype: str | None, batch: int, heads: int, kv_heads: int | None, q_len: int,
    kv_len: int | None, given: tuple[str, ...], seed: int, thread_orders: int, fast: bool, debug: bool,
    source: Path | None, name: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a spec's kernels, compare with numpy in float64, and print the errors.

    \b
    attngen check specs/gpt2.attn
    attngen check alibi --q-len 300 --heads 4
    attngen check specs/gpt2.attn --device emulated --thread-orders 3
    attngen check gpt2 --source out/gpt2_fused.cu     a file of `attngen build` that you changed

    The allowed error is twice that of the same computation in fp32 with its output rounded to the spec's type, as torch's math
    backend does it, plus one unit in the last place. The emulated device also reports races, missing barriers and
    out-of-bounds accesses.
    """
    from dataclasses import replace
    from itertools import chain

    from attngen.inspect.checking import check_spec
    from attngen.reference.problems import Shape
    from attngen.spec.dtypes import DTYPES

    loaded = load_specs(spec, name)
    if source is not None and kernel is None:
        kernel = rung_of_text(source, loaded[0].spec)
    text = source.read_text() if source else None
    devices = devices_named(device, thread_orders, fast, rung_asked(kernel, loaded), debug)
    shape = Shape(batch, heads, kv_heads or heads, q_len, q_len if kv_len is None else kv_len)
    checks = []  # all are planned before the first is run: a refusal comes alone
    for one in loaded:
        wanted = one.spec if dtype is None else replace(one.spec, dtype=DTYPES[dtype])
        with pointing_at(one):
            checks.append(
                check_spec(wanted, rungs_named(kernel, wanted), devices, shape, known_params(wanted, given), seed, text)
            )
    results = []
    table = None if as_json else _CheckTable()
    for result in chain.from_iterable(checks):
        results.append(result)
        if table is not None:
            table.add(result)
    if table is None:
        click.echo(json.dumps([_check_json(r) for r in results], indent=2))
    sys.exit(OK if all(r.comparison.passed for r in results) else FAILED)


class _CheckTable:
    """Results as they come, a line each: long checks show their progress."""

    def __init__(self) -> None:
        click.echo(
            f"{'attention':<20} {'kernel':<20} {'device':<10} {'error':>9} {'allowed':>9} {'lse':>9} {'compile':>8} {'run':>8}"
        )

    def add(self, r: Any) -> None:
        c = r.comparison
        lse = "-" if c.lse_error is None else f"{c.lse_error:.2e}"
        verdict = click.style("ok", fg="green") if c.passed else click.style("FAILED", fg="red", bold=True)
        click.echo(
            f"{r.spec:<20} {r.rung + (' ' + r.schedule if r.schedule != r.rung else ''):<20} {r.device:<10} {c.error:>9.2e} "
            f"{c.allowed:>9.2e} {lse:>9} {r.compile_seconds:>7.2f}s {r.run_seconds:>7.2f}s  {verdict}",
            color=colored(sys.stdout),
        )


def _check_json(r: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(r) | {"passed": r.comparison.passed}
