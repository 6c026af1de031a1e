"""The table of kernels that have registers enough (`attngen.plan.register_table`), made by ptxas without a GPU.

    python -m attngen.inspect.registers [--write] [--only "fused_mma pairs"] [--arch sm_80]

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

from attngen.device.cuda.compiler import compile_text, nvrtc_version
from attngen.emit.emitter import emit
from attngen.language import load_text
from attngen.plan.arch import ARCHES
from attngen.plan.facts import facts_of
from attngen.plan.plan import Plan, Schedule
from attngen.plan.register_table import HEAD_SIZES, TABLE, Family, Measured, Widest, table, to_text
from attngen.schedules.choose import BACKWARD_SCHEDULES, SCHEDULES

ARCHES_MEASURED = ("sm_80", "sm_90a", "sm_100a", "sm_120a")  # sm_86 and sm_89 have the code of sm_80
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
    """Whether something is in local memory: registers that are spilled, or arrays that find none."""
    return any(r.spill_store_bytes or r.stack_bytes for r in compile_text(emit(plan.facts.spec, plan)).resources())


def fits(family: Family, keys: int, arch: str, head_dim: int) -> bool:
    """Whether nothing is spilled; nothing is known of no kernel."""
    plans = [*plans_of(family, keys, head_dim, arch)]
    return bool(plans) and not any(map(spills, plans))


def widest(family: Family, keys: int, arch: str, guess: int, most: int) -> int:
    """The widest of HEAD_SIZES up to `most` that fits; 0: none."""
    sizes = [size for size in HEAD_SIZES if size <= most]
    place = sizes.index(guess) if guess in sizes else 0
    if not sizes or not fits(family, keys, arch, sizes[place]):
        return next((size for size in reversed(sizes[:place]) if fits(family, keys, arch, size)), 0)
    while place + 1 < len(sizes) and fits(family, keys, arch, sizes[place + 1]):
        place += 1
    return sizes[place]


def row(family: Family, arches: tuple[str, ...], known: Widest) -> Widest:
    """The numbers of `family`: the least of all architectures, and with fewer keys no less than with more."""
    found: Widest = {}
    most = 0
    for keys in sorted(SPACES[family.schedule][1].keys(family), reverse=True):
        guess, limit = max(known.get(keys, 0), most), HEAD_SIZES[-1]
        for arch in arches if most < limit else ():
            guess = limit = widest(family, keys, arch, guess, limit)
        found[keys] = most = limit
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="the rows that begin so")
    parser.add_argument("--arch", default=",".join(ARCHES_MEASURED))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    known, every = table(), [f for _, measured in SPACES.values() for f in measured.families]
    rows = {f: known[f] for f in every if f in known}
    families = [f for f in every if str(f).startswith(options.only)]
    measure = partial(row, arches=tuple(options.arch.split(",")))
    differ = 0
    with ProcessPoolExecutor(options.workers) as pool:
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
