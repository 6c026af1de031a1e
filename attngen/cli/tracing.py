"""`trace`: the memory accesses of a kernel, counted exactly, and step by step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from attngen.cli.common import (
    EPILOG,
    RUNG_CHOICE,
    arch_known,
    compiled_from,
    guarded,
    held_by,
    known_params,
    kv_len_option,
    load_specs,
    name_option,
    param_option,
    pointing_at,
    rungs_named,
    source_option,
    spec_argument,
)

LENGTH, LENGTH_OF_MANY_HEADS = 256, 64  # counts of the naive rung in seconds
LENGTH_HELP = f"Number of queries.  [default: {LENGTH}; {LENGTH_OF_MANY_HEADS} if the spec has many heads]"


@click.command(epilog=EPILOG)
@spec_argument
@click.option("--kernel", type=RUNG_CHOICE, help="One schedule, with all its access sites.  [default: the totals of several]")
@click.option("--arch", help="The architecture to generate code for.  [default: sm_80; sm_90a for wgmma and hopper]")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Batch size.")
@click.option(
    "--heads", type=click.IntRange(1), default=1, show_default=True, help="Query heads, unless the spec states `heads`."
)
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads.  [default: --heads]")
@click.option("--q-len", type=click.IntRange(1), help=LENGTH_HELP)
@kv_len_option
@param_option
@click.option("--sites", is_flag=True, help="Print all access sites of every schedule.")
@click.option("--steps", is_flag=True, help="Print what threads do, step by step.")
@click.option("--block", type=click.IntRange(0), default=0, show_default=True, help="With --steps: the block.")
@click.option("--thread", default="0", show_default=True, help="With --steps: the threads, such as 0 or 0,4,32-35.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="With --steps: at most so many of each thread."
)
@source_option
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; docs/trace.md defines the counts.")
@guarded
def trace(
    spec: str, kernel: str | None, arch: str | None, batch: int, heads: int, kv_heads: int | None, q_len: int | None,
    kv_len: int | None, given: tuple[str, ...], sites: bool, steps: bool, block: int, thread: str, limit: int,
    source: Path | None, name: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Count the memory accesses of kernels exactly, on the emulated device.

    \b
    attngen trace gpt2                                   totals of naive, tiled and fused
    attngen trace gpt2 --kernel fused                    every access site of one schedule
    attngen trace gpt2 --kernel fused --steps --thread 0,1 --limit 40
    attngen build gpt2 -o out; (change a file) attngen trace gpt2 --source out/gpt2_fused.cu

    Counts are of bytes that instructions request (before any cache), wavefronts and bank conflicts of shared memory, barriers,
    arithmetic, and idle lanes. Races, missing barriers and other mistakes are reported. docs/trace.md defines each count.
    """
    from attngen.device.emulated.tracing import NOBODY, Watch
    from attngen.inspect.trace_text import as_json as to_json
    from attngen.inspect.tracing import trace_spec
    from attngen.plan import default_arch
    from attngen.reference.free_sizes import with_free_sizes

    watch = Watch(block, _threads(thread), limit) if steps else NOBODY
    everything = []
    if arch is not None:
        arch = arch_known(arch).name
    loaded, held = held_by(source, load_specs(spec, name), kernel, arch)
    for one in loaded:
        rungs = (held.rung,) if held else _rungs(one.spec, kernel, steps)
        params = known_params(one.spec, given)
        shape = with_free_sizes(one.spec, _shape(one.spec, batch, heads, kv_heads, q_len, kv_len), params)
        target = arch or default_arch(rungs[-1] if rungs[-1] != "auto" else one.spec.schedule.rung)
        with pointing_at(one):
            results = trace_spec(
                one.spec, rungs, held.arch.name if held else target, shape, params, watch, held.text if held else None
            )
        show = None if as_json else _Shown(one.spec.name, shape.sizes(one.spec), sites or len(rungs) == 1, watch)
        with compiled_from(held):
            for result in results:
                everything.append((one.spec.name, result))
                if show is not None:
                    show.add(result)
        if show is not None:
            show.finish()
    if as_json:
        click.echo(json.dumps([{"attention": name, **to_json([t])[0]} for name, t in everything], indent=2))


def _rungs(spec: Any, kernel: str | None, steps: bool) -> tuple[str, ...]:
    """Those to trace: one if steps are asked for."""
    return (spec.schedule.rung,) if kernel is None and steps else rungs_named(kernel, spec)


def _shape(spec: Any, batch: int, heads: int, kv_heads: int | None, q_len: int | None, kv_len: int | None) -> Any:
    from attngen.reference.problems import Shape

    length = q_len or (LENGTH if (spec.q_heads or heads) * batch <= 4 else LENGTH_OF_MANY_HEADS)
    return Shape(batch, heads, kv_heads or heads, length, kv_len or length)


def _threads(text: str) -> tuple[int, ...]:
    """The numbers of "0,4,32-35"."""
    threads: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            threads += range(int(first), int(last or first) + 1)
        except ValueError:
            raise click.BadParameter(
                f"{part!r} is not a thread number or a range such as 32-35", param_hint="--thread"
            ) from None
    if not threads or max(threads) >= 1024:
        raise click.BadParameter("thread numbers are 0 to 1023", param_hint="--thread")
    return tuple(dict.fromkeys(threads))


class _Shown:
    """Rungs as they come, a line each; what else is to be said of them after the last."""

    def __init__(self, name: str, sizes: dict[str, int], sites: bool, watch: Any) -> None:
        from attngen.inspect.trace_text import TOTALS_HEADER

        self.sites, self.watch = sites, watch
        self.results: list[Any] = []
        shape = ", ".join(f"{size} {value}" for size, value in sizes.items())
        click.echo(f"{name}: {shape}\n\n{TOTALS_HEADER}")
        sys.stdout.flush()

    def add(self, result: Any) -> None:
        from attngen.inspect.trace_text import totals_line

        self.results.append(result)
        click.echo(totals_line(result))
        sys.stdout.flush()

    def finish(self) -> None:
        from attngen.inspect.trace_text import conflicts_text, sites_text, steps_text

        click.echo("\nBytes are counted as instructions request them, before any cache.\n")
        for result in self.results:
            click.echo(conflicts_text(result), nl=False)
        for result in self.results:
            if self.watch.threads:
                click.echo("\n" + steps_text(result, self.watch.block), nl=False)
            elif self.sites:
                click.echo(sites_text(result), nl=False)
