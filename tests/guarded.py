"""Random specs on a GPU whose tensors lie at the edges of mapped memory (`tests.guarded_memory`).

    python -m tests.guarded [--seed 0] [--minutes 10] [--workers 12] [--kernel hopper]

runs the forwards and gradients of `tests.random_draws` in several processes: in half of them tensors end at the edge, in the
others they begin there. Plans for older architectures run too, compiled for the GPU at hand. An access outside of a tensor
stops a process, and another one takes its place. Prints each failure with its spec, and counts by direction, schedule and
storage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from attngen.device.protocol import Kernel
from attngen.device.select import device_by_name
from attngen.emit.program import Program
from tests.guarded_memory import EDGES, GuardedMemory, leave
from tests.random_draws import case
from tests.random_gradients import gradient_case, gradient_failure
from tests.random_specs import failure

STRIDE = 1_000_003  # between the first seeds of two processes
LOST = 3  # exit code of a process whose context an access outside has ended
MULTIPROCESSORS = (2, 16, 132)  # with many, decode splits keys over blocks; with few, a persistent kernel has several tiles


@dataclass(frozen=True)
class Planned:
    """The GPU as a device of another architecture and size: plans are for these, cubins for the GPU itself."""

    gpu: Any
    arch: str
    multiprocessors: int

    @property
    def name(self) -> str:
        return str(self.gpu.name)

    def compile(self, source: Program) -> Kernel:
        kernel: Kernel = self.gpu.compile(replace(source, arch=self.gpu.arch))
        return kernel


def attempts(seed: int, kernel: str | None, gpu: Any) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """The forward and the gradients of `seed`: what each is, its problem in words, and its run, which returns what is wrong."""
    multiprocessors = MULTIPROCESSORS[seed % len(MULTIPROCESSORS)]
    one = case(seed, kernel)
    device = Planned(gpu, one.arch, multiprocessors)
    yield f"forward {one.schedule} {one.arch} {one.storage}", str(one), lambda: failure(one, seed, device)
    of_gradients = gradient_case(seed, kernel)
    if of_gradients is not None:
        place = Planned(gpu, of_gradients.arch, multiprocessors)
        what = f"backward {of_gradients.schedule} {of_gradients.arch} {of_gradients.case.storage}"
        yield what, str(of_gradients), lambda: gradient_failure(of_gradients, seed, place)


def work(edge: str, seed: int, kernel: str | None) -> None:
    """One process: seeds from `seed` on, for ever. Writes a line of JSON before and after each run."""
    memory = GuardedMemory(edge)
    memory.install()
    gpu = device_by_name("cuda")
    while True:
        for what, problem, run in attempts(seed, kernel, gpu):
            say(seed=seed, what=what, problem=problem)
            lost = False
            try:
                wrong = run()
                synchronize()
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
                lost = not is_usable()
            say(wrong=wrong)
            if lost:
                leave(LOST)
        seed += 1


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def is_usable() -> bool:
    """Whether the GPU still works for this process: an access outside of what is mapped ends that."""
    try:
        synchronize()
    except Exception:
        return False
    return True


class Errors:
    """What a process writes to its standard error, read beside its output."""

    def __init__(self, stream: Any) -> None:
        self._lines = deque[str](maxlen=30)
        self._reader = threading.Thread(target=lambda: self._lines.extend(stream))
        self._reader.start()

    def end(self) -> str:
        self._reader.join()
        return "".join(self._lines)


@dataclass
class Search:
    """What several processes found."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def follow(self, edge: str, seed: int, kernel: str | None, end: float) -> None:
        """One process after another from `seed` on, until `end`; each goes on behind the seed that stopped the one before."""
        while time.monotonic() < end:
            command = [sys.executable, "-m", "tests.guarded", "--work", edge, "--seed", str(seed)]
            command += ["--kernel", kernel] if kernel else []
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                stop = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
                stop.start()
                errors = Errors(process.stderr)
                running: dict[str, Any] | None = None
                assert process.stdout is not None
                for text in process.stdout:
                    if not text.endswith("\n"):
                        break  # the time was over while it was written
                    line = json.loads(text)
                    if "what" in line:
                        running, seed = line, line["seed"]
                    else:
                        assert running is not None
                        self.note(edge, running, line["wrong"])
                        running = None
                stop.cancel()
            if time.monotonic() >= end:
                return
            if running is not None:
                self.note(edge, running, f"the process ended: {errors.end()}")
            elif process.returncode != LOST:
                self.fail(f"a process ended after seed {seed}, between two runs: {errors.end()}")
            seed += 1

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"\n{text}", flush=True)

    def note(self, edge: str, one: dict[str, Any], wrong: str) -> None:
        with self.lock:
            self.counts[f"{edge:5} {one['what']}"] += 1
            if wrong:
                self.fail(f"seed {one['seed']}, tensors {edge} at the edge, {one['what']}: {wrong}\n{one['problem']}")
            elif self.counts.total() % 100 == 0:
                print(f"{self.counts.total()} runs, {len(self.failures)} failed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=12, help="processes; each has a core and 0.5 GB of the GPU's memory")
    parser.add_argument("--kernel", help="specs of this schedule alone")
    parser.add_argument("--work", choices=EDGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seed, options.kernel)
    search, end = Search(), time.monotonic() + 60 * options.minutes
    threads = [
        threading.Thread(target=search.follow, args=(EDGES[i % 2], options.seed + STRIDE * (i // 2), options.kernel, end))
        for i in range(options.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for what, count in sorted(search.counts.items()):
        print(f"{count:6} {what}")
    searched = f"{options.workers} processes, {options.minutes:g} minutes"
    print(f"{search.counts.total()} runs in {searched}; {len(search.failures)} failed")
    sys.exit(1 if search.failures else 0)


if __name__ == "__main__":
    main()
