"""The default plans whose kernels spill registers, found by ptxas without a GPU.

    python -m attngen.inspect.spilled [--write] [--only fused_mma] [--arch sm_80] [--jobs 2]

The default plans are those of all shipped specs, and of the specs of the table of registers (`attngen.plan.variants`) with each
common head size, on each architecture. Exit code 1 says that some spill that are not noted. With --write, the kernels of these
plans are noted (`attngen.plan.register_table.Spilled`), so that planning takes the next tile, until no other plan spills;
what was noted before is dropped. A noted kernel is still planned if there is no next tile, as of decode with 16 keys. Stopped
before the end, it goes on with what the cache of kernels has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from attngen.cache.disk_cache import digest
from attngen.device.cuda.compiler import CACHE, compile_text, nvrtc_version
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect.registers import SPACES, parsed
from attngen.language import load_file, load_text
from attngen.plan.arch import ARCHES
from attngen.plan.facts import SpecFacts, facts_of
from attngen.plan.plan import Plan
from attngen.plan.register_table import Spilled, file_of_spilled, spilled, spilled_by, spilled_to_text
from attngen.plan.variants import SPECS
from attngen.shipped import spec_directory
from attngen.spec.attention import AttentionSpec

COMMON_HEAD_SIZES = (32, 64, 80, 96, 128, 160, 256)


def shipped_specs() -> Iterator[AttentionSpec]:
    for path in sorted(spec_directory().glob("*.attn")):
        yield from load_file(path)


def specs_of_the_table() -> Iterator[AttentionSpec]:
    for head_dim in COMMON_HEAD_SIZES:
        for kind in SPECS.values():
            for statements in kind:
                yield from load_text(f"attention measured {{ dtype fp16 head_dim {head_dim} {statements} }}")


def planned_specs(schedule: str, arch: str) -> list[SpecFacts]:
    """The specs of which a schedule's default plans are compiled."""
    owner = SPACES[schedule][0]
    return [f for f in map(facts_of, (*shipped_specs(), *specs_of_the_table())) if owner.suits(f, ARCHES[arch])]


def default_plan(schedule: str, arch: str, facts: SpecFacts) -> Plan:
    """The default plan of a spec; not by `choose`, which remembers plans that were made before more was noted."""
    return SPACES[schedule][0].plan(facts, ARCHES[arch])


def default_plans(schedule: str, arch: str) -> Iterator[Plan]:
    """The default plans of a schedule whose registers are measured."""
    return (default_plan(schedule, arch, facts) for facts in planned_specs(schedule, arch))


def spilled_bytes(program: Program) -> int:
    """Bytes of local memory of a program's kernels: registers that are spilled, and arrays. From the cache, or compiled."""
    key = digest(program.text, program.arch, nvrtc_version())
    return int(CACHE.data(f"{program.name}-{program.arch}-{key}.spilled", lambda: str(_counted(program)).encode()))


def _counted(program: Program) -> int:
    return max(max(r.spill_store_bytes, r.stack_bytes) for r in compile_text(program).resources())


def main() -> int:
    options, names = parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    found = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for schedule in names:
            arches = [arch for arch in SPACES[schedule][1].arches if arch in (options.arch or ARCHES)]
            if options.write:
                _note(schedule, {kernel for kernel in _noted(schedule) if kernel.arch not in arches})
            for arch in arches:
                found += _compile(pool, schedule, arch, options.write)
    return int(bool(found) and not options.write)


def _compile(pool: ProcessPoolExecutor, schedule: str, arch: str, write: bool) -> int:
    """The number of default plans that spill; with `write` they are noted, and the plans that replace them compiled."""
    done: set[Program] = set()
    count = 0
    while True:
        plans = {emit(plan.facts.spec, plan): plan for plan in default_plans(schedule, arch)}
        todo = [program for program in plans if program not in done]
        done.update(todo)
        print(f"{len(todo)} default plans of {schedule} on {arch}", flush=True)
        found = [plans[p] for p, size in zip(todo, pool.map(spilled_bytes, todo), strict=True) if size]
        spilling = [plan for plan in found if SPACES[schedule][1].as_spilled(plan) not in _noted(schedule)]
        count += len(spilling)
        for plan in spilling:
            print(f"{plan.facts.spec.name}: {SPACES[schedule][1].as_spilled(plan)}", flush=True)
        if not (write and spilling):
            return count
        _note(schedule, {*_noted(schedule), *(SPACES[schedule][1].as_spilled(plan) for plan in spilling)})


def _noted(schedule: str) -> frozenset[Spilled]:
    return spilled_by(schedule, f"NVRTC-{nvrtc_version()}")


def _note(schedule: str, kernels: set[Spilled]) -> None:
    path = file_of_spilled(schedule, f"NVRTC-{nvrtc_version()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(spilled_to_text(kernels), "utf-8")
    spilled.cache_clear()


if __name__ == "__main__":
    sys.exit(main())
