"""How long commands take, from the start of the process to its end. Needs no GPU.

    python benchmarks/commands.py [BEFORE] [--rounds 7] [--cold-rounds 1] [--spec gpt2] [--only build] [--cpu]

`build` writes the files of a spec; `check` checks its forward on the emulated device by each kind of kernel. The cache on disk
is empty (cold) or was filled by the same command (warm). With --cpu, times are those of processors, the command's processes
added up, which says more on a machine that others use too. BEFORE is another checkout, such as `git worktree add --detach`
makes: its commands take turns with this one's, and the table has the ratio of the medians. Both run with their bytecode, as
pip installs packages.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

from installed import Installed, installed
from words import markdown

COMMAND = ("-m", "attngen")
KERNELS = ("naive", "tiled", "fused")
Times = dict[tuple[str, str], list[float]]  # seconds of each round, by the case and the version


def command_lines(version: Installed, spec: str, out: Path) -> dict[str, list[str]]:
    """The arguments of each case."""
    path = str(version.root / "specs" / f"{spec}.attn")
    forward = ["--forward"] if "--forward" in version.output([*COMMAND, "check", "--help"]) else []  # older: no backward at all
    checks = {k: [*COMMAND, "check", path, *forward, "--kernel", k, "--device", "emulated"] for k in KERNELS}
    return {"build": [*COMMAND, "build", path, "-o", str(out / "built")], **{f"check, {k}": line for k, line in checks.items()}}


def cpu_seconds() -> float:
    """Processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(
    versions: tuple[Installed, ...], spec: str, rounds: int, cold_rounds: int, only: str, clock: Callable[[], float]
) -> Times:
    times: Times = {}
    with tempfile.TemporaryDirectory() as directory:
        lines = {v: command_lines(v, spec, Path(directory)) for v in versions}
        for case in (case for case in lines[versions[0]] if only in case):
            caches = {v: Path() for v in versions}
            for disk, count in {"cold": cold_rounds, "warm": rounds}.items():
                for _, version in product(range(count), versions):
                    if disk == "cold":
                        caches[version] = Path(tempfile.mkdtemp(dir=directory))
                    start = clock()
                    version.output(lines[version][case], caches[version])
                    took = clock() - start
                    times.setdefault((f"{case}, {disk}", version.name), []).append(took)
                    print(json.dumps({"case": f"{case}, {disk}", "version": version.name, "s": took}), flush=True)
    return times


def table(times: Times, versions: tuple[Installed, ...]) -> str:
    titles = ["command", *(f"{v.name}, s" for v in versions), *(["now / before"] if len(versions) > 1 else [])]
    lines = []
    for case in dict.fromkeys(case for case, _ in times):
        medians = [median(times[case, v.name]) for v in versions]
        ratio = [f"{medians[0] / medians[1]:.2f}"] if len(versions) > 1 else []
        lines.append([case, *(f"{m:.2f}" for m in medians), *ratio])
    return markdown(titles, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold-rounds", type=int, default=1)
    parser.add_argument("--spec", default="gpt2")
    parser.add_argument("--only", default="", help="the commands whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="processor time")
    options = parser.parse_args()
    with installed(options.before) as versions:
        clock = cpu_seconds if options.cpu else time.perf_counter
        times = measured(versions, options.spec, options.rounds, options.cold_rounds, options.only, clock)
        print(table(times, versions))


if __name__ == "__main__":
    main()
