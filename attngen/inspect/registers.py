"""The table of kernels that have registers enough (`attngen.plan.register_table`), made by ptxas without a GPU.

    python -m attngen.inspect.registers [--write] [--only "fused_mma pairs"] [--arch sm_80] [--jobs 16]

For each family and number of keys, the widest head size of which no spec of the family spills a register, on each architecture.
The table that is there says where to begin: two compilations of a spec confirm a number. Without --write, nothing is written,
and exit code 1 says that some rows differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate

from attngen.device.cuda.compiler import compile_text, nvrtc_version
from attngen.emit.emitter import emit
from attngen.language import load_text
from attngen.plan.arch import ARCHES
from attngen.plan.facts import facts_of
from attngen.plan.plan import Plan, Schedule
from attngen.plan.register_table import TABLE, Family, Measured, Widest, table, to_text
from attngen.schedules.choose import BACKWARD_SCHEDULES, SCHEDULES

SPACES: dict[str, tuple[Schedule, Measured]] = {
    s.name: (s, s.measured) for s in (*SCHEDULES, *BACKWARD_SCHEDULES) if s.measured
}


def plans_of(family: Family, keys: int, head_dim: int, arch: str) -> Iterator[Plan]:
    """The plans that are compiled for a cell; none if the family has no such tile."""
    schedule, measured = SPACES[family.schedule]
    for statements in measured.specs(family):
        (spec,) = load_text(f"attention measured {{ head_dim {head_dim} {statements} }}")
        plan = measured.plan(schedule, family, facts_of(spec), ARCHES[arch], keys)
        if plan is not None:
            yield plan


def spills(plan: Plan) -> bool:
    """Whether something is in local memory (registers that are spilled, or arrays that find none), or products wait for each
    other for want of registers."""
    made = compile_text(emit(plan.facts.spec, plan))
    return made.is_serialized or any(r.spill_store_bytes or r.stack_bytes for r in made.resources())


def fits(family: Family, keys: int, arch: str, head_dim: int) -> bool:
    """Whether nothing is spilled; nothing is known of no kernel."""
    plans = [*plans_of(family, keys, head_dim, arch)]
    return bool(plans) and not any(map(spills, plans))


def widest(family: Family, keys: int, arch: str, guess: int, most: int) -> int:
    """The widest of the schedule's head sizes up to `most` that fits; 0: none."""
    sizes = [0, *(size for size in SPACES[family.schedule][1].head_sizes if size <= most)]
    fitting, last, guessed = 0, len(sizes) - 1, sizes.index(guess) if guess in sizes[1:] else len(sizes)
    while fitting < last:
        place = next((n for n in (guessed, guessed + 1) if fitting < n <= last), (fitting + last + 1) // 2)
        if fits(family, keys, arch, sizes[place]):
            fitting = place
        else:
            last = place - 1
    return sizes[fitting]


def row(family: Family, arches: tuple[str, ...], known: Widest) -> Widest:
    """The numbers of `family`: the least of all architectures; with more keys no more than with fewer: ptxas may have luck."""
    _, measured = SPACES[family.schedule]
    found: Widest = {}
    most = 0
    for keys in sorted(measured.keys(family), reverse=True):
        guess, limit = max(known.get(keys, 0), most), measured.head_sizes[-1]
        for arch in arches or measured.arches if most < limit else ():
            guess = limit = widest(family, keys, arch, guess, limit)
        found[keys] = most = limit
    return dict(zip(sorted(found), accumulate((found[keys] for keys in sorted(found)), min), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="the rows that begin so")
    parser.add_argument("--arch", action="append", default=[], help="instead of all that the schedule is for")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    known, every = table(), [f for _, measured in SPACES.values() for f in measured.families]
    rows = {f: known[f] for f in every if f in known}
    families = [f for f in every if str(f).startswith(options.only)]
    measure = partial(row, arches=tuple(options.arch))
    differ = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = {f: pool.submit(measure, f, known=known.get(f, {})) for f in families}
        for family, job in jobs.items():
            rows[family] = found = job.result()
            if found != known.get(family):
                differ += 1
                print(family, found, flush=True)
            if options.write:
                TABLE.write_text(to_text({f: rows[f] for f in every if f in rows}, f"NVRTC {nvrtc_version()}"))
    return int(bool(differ) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
