"""`tune`: the fastest tile sizes of a spec's forward or backward, by timing all of them on the GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import colored, whole_numbers
from attngen.cli.specs import Gradients, arch_named, known_params, load_one_spec, source_of

if TYPE_CHECKING:
    from attngen.bench.tune import Outcome
    from attngen.language import Loaded


@click.command("tune")
@click.argument("spec")
@options.kernel
@click.option("--lengths", default="512,2048,8192", show_default=True, help="Sequence lengths, separated by commas.")
@options.size("--q-len", 1, "Query rows of a sequence, for decoding.  [default: its length]")
@options.tokens
@options.number("--rounds", 2, "Number of timings of each finalist.", 21)
@options.param
@options.gradients
@click.option("--list", "only_list", is_flag=True, help="List the combinations that would be timed. Needs no GPU.")
@options.arch
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON; docs/json.md lists the keys.")
def command(
    spec: str, kernel: str | None, lengths: str, q_len: int | None, tokens: int, rounds: int, given: tuple[str, ...],
    gradients: Gradients, only_list: bool, arch: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Time the tile sizes, stages, warps and places of Q that fit a spec on the GPU, and remember the fastest.

    \b
    attngen tune specs/gpt2.attn
    attngen tune llama_gqa --lengths 4096 --tokens 4096
    attngen tune llama_gqa --kernel decode --q-len 1       tokens that are generated one by one
    attngen tune alibi --backward --wanted q,k,v,slopes
    attngen tune gpt2 --backward --deterministic
    attngen tune gpt2 --list --arch sm_90a                 what would be timed

    It varies what a `kernel` statement may state; no schedule has all of these:

    \b
    tile      query rows x keys of a tile; of a backward, what a block owns and what it visits at once
    stages    tiles that shared memory has room for: the next are copied while one is multiplied
    warps     of a block: each has 16 or 32 rows; on Hopper, four for the producer and four for each consumer
    q         whether the fragments of Q stay in registers, or are read from shared memory for each tile

    attngen compiles and times all combinations that fit shared memory and spill no register (by a table that ptxas made), and
    times the best ones again, for longer. The winner is kept on disk for this spec, this architecture, this schedule and these
    sizes, rounded up to powers of 2 (of the keys, and of the rows of all heads and batches). `attngen.compile` then uses it for
    calls of such sizes. A spec that states `tile`, `stages`, `warps` or `q` itself cannot be tuned. `attngen cache list --kind
    tuned` lists the winners.

    With --backward the same is done for the gradients, all kernels of the backward together; the forward is not timed. The
    winner is kept for these gradients alone: the forward, backwards that compute others, and deterministic backwards are tuned
    separately. Training in torch and `backward()` then use it. The backward ignores the tile that the spec states, so that
    it can always be tuned.
    """
    from attngen.device.protocol import DeviceError
    from attngen.device.select import has_gpu
    from attngen.device.tuning_cache import is_open
    from attngen.schedules import SCHEDULES, overridden

    one = load_one_spec(spec)
    if kernel is not None:
        one = replace(one, spec=replace(one.spec, kernel=overridden(one.spec.kernel, kernel)))
    wanted = gradients.of(one.spec)
    has_tiles = all(s.is_tiled for s in SCHEDULES if s.keyword == one.spec.kernel.schedule)
    if not (has_tiles and is_open(one.spec, wanted)):
        what = "its own kernel" if wanted else "its own kernel, tile, stages, warps or place of Q"
        raise click.UsageError(f"{one.spec.name} states {what}: nothing is left to tune")
    if only_list:
        options.refuse("--list prints text and times nothing", "lengths", "q_len", "tokens", "rounds", "given", "as_json")
        _list_candidates(one, arch, kernel, gradients)
        return
    options.refuse("the GPU that times is the one that is tuned for: only --list has another architecture", "arch")
    if not has_gpu():
        raise DeviceError("tuning needs a GPU, and none was found; `attngen tune --list` shows what would be timed")
    try:
        from attngen.bench import sweep, tune
    except ImportError as error:
        raise click.UsageError("tuning needs torch: pip install torch") from error
    if wanted and not as_json:
        click.echo(f"the backward of {one.spec.name}: gradients of {', '.join(wanted)}")
    todo = list(sweep.cases(one.spec, whole_numbers(lengths, "--lengths"), [], [], False, tokens))
    params, outcomes = known_params(one.spec, given), []
    parts = tune.parts(one.spec, wanted, gradients.deterministic)
    for number, case in enumerate((replace(c, rows=q_len) for c in todo), 1):
        place = f"[{number}/{len(todo)}]"
        if not as_json:
            click.echo(click.style(f"{case.title}", bold=True), color=colored(sys.stdout))
        for part in parts:
            found = tune.tune(case, params, rounds, partial(_progress, place), part, gradients.deterministic)
            outcomes.append({"case": case.title, "gradients": list(part), **found.to_json()})
            if not as_json:
                if len(parts) > 1:
                    click.echo(f"  gradients of {', '.join(part)}, which have a program of their own")
                _show_outcome(found)
    if as_json:
        of_all = {"attention": one.spec.name, "gradients": list(wanted), "deterministic": gradients.deterministic}
        click.echo(json.dumps({**of_all, "cases": outcomes}, indent=2))


def _list_candidates(one: Loaded, arch: str | None, kernel: str | None, gradients: Gradients) -> None:
    from attngen.diagnostics import counted
    from attngen.schedules import alternatives, title_of

    target = arch_named(arch, kernel, [one])
    planned, _ = source_of(one, target, kernel, gradients)
    found = alternatives(planned)
    click.echo(f"{planned.title} on {target.name}: {counted(len(found), 'combination')}")
    for number, request in enumerate(found):
        click.echo(f"  {title_of(request):<42} {'' if number else 'planned'}".rstrip())


def _show_outcome(found: Outcome) -> None:
    planned = next(t for t in found.tried if t.planned)
    for t in found.tried:
        marks = ", ".join((*(["planned"] if t.planned else []), *(["remembered"] if t.kernel == found.winner.kernel else [])))
        speed = planned.timing.median / t.timing.median
        line = f"  {t.title:<42} {t.timing.median:>8.3f} ms  x{speed:.2f}  {marks}".rstrip()
        click.echo(click.style(line, bold="remembered" in marks), color=colored(sys.stdout))
    click.echo(f"  the best of {found.of}" + ("" if found.kept else "; it could not be written to the cache"))


def _progress(place: str, text: str) -> None:
    click.echo(f"{place} {text}", err=True)
