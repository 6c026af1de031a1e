"""The table of kernels that have registers enough (`attngen.plan.register_table`), made by ptxas without a GPU.

    python -m attngen.inspect.registers [--write] [--missing] [--only hopper,decode] [--rows "pairs 16-bit"] [--jobs 16]

For each family and number of keys, the widest head size of which no spec of the family spills a register, on each architecture,
by the NVRTC that is installed. The table that is there says where to begin: two compilations of a spec confirm a number. If a
narrower head spills and a wider one does not, the number depends on where the search began; kernels of default plans that spill
although the table has room for them are found by `attngen.inspect.spilled`.

With --write the files are written while it runs: stopped before the end, it goes on with --missing, which compiles only what
the files lack. Without --write, nothing is written, and exit code 1 says that some rows differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from bisect import bisect
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import NamedTuple

from attngen.device.cuda.compiler import compile_text, nvrtc_version
from attngen.device.protocol import CompilationError
from attngen.emit.emitter import emit
from attngen.language import load_text
from attngen.plan.arch import ARCHES
from attngen.plan.facts import facts_of
from attngen.plan.plan import Plan, Schedule
from attngen.plan.register_table import HEAD_SIZES, Family, Measured, Widest, file_of, measured_by, table, to_text
from attngen.schedules.backward import BACKWARD_SCHEDULES
from attngen.schedules.registry import SCHEDULES

SPACES: dict[str, tuple[Schedule, Measured]] = {
    s.name: (s, s.measured) for s in (*SCHEDULES, *BACKWARD_SCHEDULES) if s.measured
}
SAVED_EVERY = 5.0  # seconds
TOO_FEW = "Insufficient registers"  # what ptxas says if an instruction takes more than a thread has


class Cell(NamedTuple):
    family: Family
    keys: int


def plans_of(family: Family, keys: int, head_dim: int, arch: str) -> Iterator[Plan]:
    """The plans that are compiled for a cell; none if the family has no such tile."""
    schedule, measured = SPACES[family.schedule]
    for statements in measured.specs(family):
        (spec,) = load_text(f"attention measured {{ head_dim {head_dim} {statements} }}")
        plan = measured.plan(schedule, family, facts_of(spec), ARCHES[arch], keys)
        if plan is not None:
            yield plan


def spills(plan: Plan) -> bool:
    """Whether something is in local memory, spilled or an array, or products wait for each other for want of registers."""
    try:
        made = compile_text(emit(plan.facts.spec, plan))
    except CompilationError as error:
        if TOO_FEW in error.log:
            return True
        raise
    return made.is_serialized or any(r.spill_store_bytes or r.stack_bytes for r in made.resources())


def fits(family: Family, keys: int, arch: str, head_dim: int) -> bool:
    """Whether nothing is spilled; nothing is known of no kernel."""
    plans = [*plans_of(family, keys, head_dim, arch)]
    return bool(plans) and not any(map(spills, plans))


def widest(family: Family, keys: int, arch: str, guess: int, most: int) -> int:
    """The widest head size up to `most` that fits, 0: none. One of which the family has no kernel counts as fitting."""
    sizes = [0, *(size for size in HEAD_SIZES if size <= most and any(plans_of(family, keys, size, arch)))]
    fitting, last, guessed = 0, len(sizes) - 1, bisect(sizes, guess) - 1 or len(sizes)
    while fitting < last:
        place = next((n for n in (guessed, guessed + 1) if fitting < n <= last), (fitting + last + 1) // 2)
        if fits(family, keys, arch, sizes[place]):
            fitting = place
        else:
            last = place - 1
    return max((size for size in HEAD_SIZES if size < sizes[fitting + 1]), default=0) if sizes[fitting + 1 :] else most


def measure(cell: Cell, guess: int, arches: tuple[str, ...]) -> int | str:
    """The number of a cell, the least of all architectures; or what went wrong, in words."""
    measured = SPACES[cell.family.schedule][1]
    limit = HEAD_SIZES[-1]
    try:
        for arch in arches or measured.arches:
            if limit:
                guess = limit = widest(*cell, arch, guess, limit)
    except Exception as error:  # one cell's failure leaves the others
        return f"{type(error).__name__}: {error}"
    return limit


def cells_of(names: list[str], rows: str) -> list[Cell]:
    """The cells of these schedules whose rows begin with `rows`."""
    families = [f for name in names for f in SPACES[name][1].families]
    families = [f for f in families if str(f).partition(" ")[2].startswith(rows)]
    return [Cell(f, keys) for f in families for keys in SPACES[f.schedule][1].keys(f)]


def save(found: Mapping[Family, Widest], compiler: str, schedules: set[str]) -> None:
    """Write the files of `schedules`: rows and cells that are still of the space."""
    for name in schedules:
        measured, rows = SPACES[name][1], {}
        for family in measured.families:
            known = found.get(family, {})
            sizes = {keys: known[keys] for keys in sorted(measured.keys(family)) if keys in known}
            if sizes:
                rows[family] = sizes
        path = file_of(name, compiler)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_text(rows), "utf-8")


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """The command line of what is compiled for tables, and the schedules that it names: those of --only, or all."""
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="these schedules, separated by commas, instead of all")
    parser.add_argument("--arch", action="append", default=[], help="instead of all that a schedule is for")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in SPACES]:
        parser.error(f"no table of {', '.join(unknown)}; there are {', '.join(SPACES)}")
    return options, names or list(SPACES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="only the cells that the files of this compiler lack")
    parser.add_argument("--rows", default="", help="the rows that begin so")
    options, names = parsed(parser)
    compiler = f"NVRTC-{nvrtc_version()}"
    found = {family: sizes for name in SPACES for family, sizes in measured_by(name, compiler).items()}
    todo = [cell for cell in cells_of(names, options.rows) if not (options.missing and cell.keys in found.get(cell.family, {}))]
    begun = saved = time.monotonic()
    differ, failed, schedules = 0, 0, {cell.family.schedule for cell in todo}
    print(f"{len(todo)} cells of {', '.join(sorted(schedules))} by {compiler}", flush=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs: dict[Future[int | str], Cell] = {}
        for cell in todo:
            known = {**table(cell.family.schedule).get(cell.family, {}), **found.get(cell.family, {})}
            guess = known.get(cell.keys, 0)
            jobs[pool.submit(measure, cell, guess, tuple(options.arch))] = cell
        for done, job in enumerate(as_completed(jobs), 1):
            cell, size = jobs[job], job.result()
            if isinstance(size, str):
                failed += 1
                print(f"{cell.family} {cell.keys} keys failed: {size}", flush=True)
            elif size != found.get(cell.family, {}).get(cell.keys):
                differ += 1
                if not options.write:
                    print(f"{cell.family}, {cell.keys} keys: {size}", flush=True)
                found.setdefault(cell.family, {})[cell.keys] = size
            if done == len(todo) or time.monotonic() - saved > SAVED_EVERY:
                saved = time.monotonic()
                print(f"{done} of {len(todo)} cells, {saved - begun:.0f} s", flush=True)
                if options.write:
                    save(found, compiler, schedules)
    return int(bool(failed) or bool(differ and not options.write))


if __name__ == "__main__":
    sys.exit(main())
