"""`trace`: exact counts of a kernel's memory accesses, and the steps of its threads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli import options, specs

if TYPE_CHECKING:
    from attngen.device.emulated.tracing import Watch
    from attngen.inspect.tracing import ScheduleTrace
    from attngen.reference.problems import Shape
    from attngen.spec.attention import AttentionSpec

THREADS = 1024  # per block, at most
LENGTH, LENGTH_OF_MANY_HEADS = 256, 64  # the naive kernel takes seconds at these
LENGTH_HELP = f"Number of queries.  [default: {LENGTH}; {LENGTH_OF_MANY_HEADS} if the spec has many heads]"


@click.command("trace")
@options.spec
@click.option(
    "--kernel", type=options.SCHEDULES, help="One schedule, with all its access sites.  [default: the totals of several]"
)
@click.option("--arch", help="The architecture to generate code for.  [default: sm_80; sm_90a for wgmma and hopper]")
@options.size("--batch", 1, "Batch size.", 1)
@options.size("--heads", 1, "Query heads, unless the spec states `heads`.", 1)
@options.size("--kv-heads", 1, "Key/value heads.  [default: --heads]")
@options.size("--q-len", 1, LENGTH_HELP)
@options.kv_len
@options.param
@options.gradients
@click.option("--sites", is_flag=True, help="Print all access sites of every schedule.")
@click.option("--steps", is_flag=True, help="Print what threads do, step by step.")
@options.number("--block", 0, "With --steps: the block.", 0)
@click.option("--thread", default="0", show_default=True, help="With --steps: the threads, such as 0 or 0,4,32-35.")
@options.number("--limit", 1, "With --steps: at most this many steps of each thread.", 100)
@options.source
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; docs/json.md lists the keys.")
def command(
    spec: str, kernel: str | None, arch: str | None, batch: int, heads: int, kv_heads: int | None, q_len: int | None,
    kv_len: int | None, given: tuple[str, ...], gradients: specs.Gradients, sites: bool,
    steps: bool, block: int, thread: str, limit: int, source: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Count the memory accesses of kernels exactly, on the emulated device.

    \b
    attngen trace gpt2                                   totals of naive, tiled and fused
    attngen trace gpt2 --kernel fused                    every access site of one schedule
    attngen trace gpt2 --kernel fused --steps --thread 0,1 --limit 40
    attngen trace gpt2 --backward                        totals of the backwards
    attngen build gpt2 -o out; (change a file) attngen trace gpt2 --source out/gpt2_fused.cu

    Counts are of bytes that instructions request (before any cache), wavefronts and bank conflicts of shared memory, barriers,
    arithmetic, and idle lanes. Races, missing barriers and other mistakes are reported. docs/trace.md defines each count.
    """
    if not steps:
        options.refuse("without --steps there are no steps to select", "block", "thread", "limit")
    from attngen.device.emulated.tracing import NOBODY, Watch
    from attngen.inspect.trace_text import as_json as to_json
    from attngen.inspect.tracing import trace_spec
    from attngen.reference.free_sizes import with_free_sizes
    from attngen.schedules import default_arch

    watch = Watch(block, _threads(thread), limit) if steps else NOBODY
    everything = []
    if arch is not None:
        arch = specs.arch_known(arch).name
    loaded = specs.load_specs(spec)
    chosen = specs.Chosen(loaded, kernel, arch, gradients.backward or None, gradients).by_source(source)
    _, kernel, arch, _, gradients, changed = chosen
    for one in chosen.loaded:
        wanted = gradients.of(one.spec)
        schedules = _schedules(one.spec, kernel, steps, wanted, arch)
        params = specs.known_params(one.spec, given)
        shape = with_free_sizes(one.spec, _shape(one.spec, batch, heads, kv_heads, q_len, kv_len), params)
        if kernel is None and not (wanted or steps):
            with specs.pointing_at(one):
                schedules = tuple(dict.fromkeys((*schedules, *_of_lengths(one.spec, arch, shape))))
        target = arch or default_arch(schedules[-1] if schedules[-1] != "auto" else one.spec.kernel.schedule)
        with specs.pointing_at(one):
            said = (watch, chosen.text, 0, wanted, gradients.deterministic)
            results = trace_spec(one.spec, schedules, target, shape, params, *said)
        show = (
            None
            if as_json
            else _TraceTable(one.spec.name, shape.sizes(one.spec), sites or (len(schedules) == 1 and not steps), watch)
        )
        with specs.compilation_errors_in(changed), specs.pointing_at(one):
            for result in results:
                everything.append((one.spec.name, result))
                if show is not None:
                    show.add(result)
        if show is not None:
            show.finish()
    if as_json:
        click.echo(json.dumps([{"attention": name, **to_json([t])[0]} for name, t in everything], indent=2))


def _schedules(
    spec: AttentionSpec, kernel: str | None, steps: bool, gradients: tuple[str, ...], arch: str | None
) -> tuple[str, ...]:
    """The schedules to trace: only the spec's own with --steps."""
    from attngen.schedules import default_arch

    if kernel is None and steps:
        return (spec.kernel.schedule,)
    return specs.schedules_named(kernel, spec, gradients, specs.arch_known(arch or default_arch(kernel)))


def _of_lengths(spec: AttentionSpec, arch: str | None, shape: Shape) -> tuple[str, ...]:
    """The schedule that `auto` has for calls of this shape alone, if it has one: keys may be split."""
    from attngen.schedules import choose, default_arch

    target = specs.arch_known(arch or default_arch())
    problem = specs.own_problem(spec, target, None, shape.q_len, shape.kv_len)
    return () if problem is None else (choose(spec, target, None, problem).keyword,)


def _shape(spec: AttentionSpec, batch: int, heads: int, kv_heads: int | None, q_len: int | None, kv_len: int | None) -> Shape:
    from attngen.reference.problems import Shape

    length = q_len or (LENGTH if (spec.q_heads or heads) * batch <= 4 else LENGTH_OF_MANY_HEADS)
    return Shape(batch, heads, kv_heads or heads, length, kv_len or length)


def _threads(text: str) -> tuple[int, ...]:
    """The thread numbers of a text such as "0,4,32-35"."""
    threads: list[int] = []
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", part)
        if numbers is None:
            raise click.BadParameter(f"{part!r} is not a thread number or a range such as 32-35", param_hint="--thread")
        first, last = int(numbers[1]), int(numbers[2] or numbers[1])
        if last < first:
            raise click.BadParameter(f"{part.strip()}: the range ends before it begins", param_hint="--thread")
        if last >= THREADS:
            raise click.BadParameter(f"{part.strip()}: thread numbers are 0 to {THREADS - 1}", param_hint="--thread")
        threads += range(first, last + 1)
    return tuple(dict.fromkeys(threads))


class _TraceTable:
    """Totals, printed as each schedule finishes; conflicts, sites and steps follow at the end."""

    def __init__(self, name: str, sizes: dict[str, int], sites: bool, watch: Watch) -> None:
        from attngen.inspect.trace_text import TOTALS_HEADER

        self.sites, self.watch = sites, watch
        self.results: list[ScheduleTrace] = []
        shape = ", ".join(f"{size} {value}" for size, value in sizes.items())
        click.echo(f"{name}: {shape}\n\n{TOTALS_HEADER}")

    def add(self, result: ScheduleTrace) -> None:
        from attngen.inspect.trace_text import totals_line

        self.results.append(result)
        click.echo(totals_line(result))

    def finish(self) -> None:
        from attngen.inspect.trace_text import conflicts_text, sites_text, steps_text

        click.echo("\nBytes are counted as instructions request them, before any cache.\n")
        for result in self.results:
            click.echo(conflicts_text(result), nl=False)
        for result in self.results:
            if self.sites:
                click.echo(sites_text(result), nl=False)
            if self.watch.threads:
                click.echo("\n" + steps_text(result, self.watch.block), nl=False)
