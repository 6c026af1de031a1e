"""How long the first call of a variant takes, from the spec to the result on the GPU, for each fused schedule.

    python benchmarks/first_call.py [BEFORE] [--write docs/tables]

Each line is the median of several processes. Torch and the GPU are initialized before the clock starts. The cache on disk is
empty (cold) or was filled by another process (warm); NVRTC's own cache is not used. `import` is the time of `import
attngen.torch`, `first` the first call of the process, `next` the first call of another variant after it, `import + first` what
a user waits for. BEFORE is another checkout, such as `git worktree add --detach` makes; its processes take turns with this
one's. Both run with their bytecode, as pip installs packages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from installed import Installed, installed
from markers import write_between

CHILD = """
import json, sys, time, torch
q, k, v = torch.randn(3, 2, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
torch.matmul(q, k.transpose(2, 3)); torch.cuda.synchronize()
start = time.perf_counter()
from attngen.torch import Attention
imported = 1e3 * (time.perf_counter() - start)

def milliseconds(**description):
    start = time.perf_counter()
    Attention(**description, mode=sys.argv[1])(q, k, v)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)

first = milliseconds(mask="causal and q - k < 300")
next = [milliseconds(mask="causal", score="softcap(30.0)"), milliseconds(mask="prefix(100) or causal")]
print(json.dumps({"import": imported, "first": first, "import + first": imported + first, "next": sum(next) / 2}))
"""


SCHEDULES = ("fused", "hopper")
DISKS = ("cold", "warm")
LIMIT = 2000  # ms
Times = dict[str, dict[str, list[float]]]  # milliseconds of each process, by disk and call, by schedule


def child(version: Installed, cache: str, schedule: str) -> dict[str, float]:
    result: dict[str, float] = json.loads(version.output(["-c", CHILD, schedule], cache).splitlines()[-1])
    return result


def measured(versions: tuple[Installed, ...], rounds: int) -> dict[str, Times]:
    """By the version."""
    times: dict[str, Times] = {version.name: {} for version in versions}
    for _, schedule, version in product(range(rounds), SCHEDULES, versions):
        with tempfile.TemporaryDirectory() as cache:
            for disk in DISKS:
                for which, value in child(version, cache, schedule).items():
                    name = f"{disk}, {which}"
                    times[version.name].setdefault(name, {}).setdefault(schedule, []).append(value)
                    row = {"version": version.name, "case": name, "schedule": schedule, "ms": value}
                    print(json.dumps(row), flush=True)
    return times


def table(times: Times) -> str:
    lines = [f"| ms by cache on disk, call | {' | '.join(SCHEDULES)} |", "|---" * (1 + len(SCHEDULES)) + "|"]
    for name, by_schedule in times.items():
        lines.append(f"| {name} | {' | '.join(f'{median(by_schedule[schedule]):.0f}' for schedule in SCHEDULES)} |")
    cold = [ms for name, by_schedule in times.items() if name in ("cold, first", "cold, next") for ms in by_schedule.values()]
    most, longest = max(map(median, cold)), max(map(max, cold))
    goal = f"Goal: a cold call, compile included, within {LIMIT} ms."
    lines.append(f"\n{goal} Measured: at most {most:.0f}; in one process {longest:.0f}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    with installed(options.before) as versions:
        times = measured(versions, options.rounds)
    import torch

    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds} processes"
    texts = {name: f"{where}\n\n{table(found)}" for name, found in times.items()}
    for name, text in texts.items():
        print(f"\n{name}: {text}")
    if options.json:
        options.json.write_text(json.dumps(times, indent=1))
    if options.write:
        write_between(options.write, "first_call", texts["now"])


if __name__ == "__main__":
    main()
