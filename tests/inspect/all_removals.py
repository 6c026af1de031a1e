"""What a default `attngen check --source` says of each emitted file of `generated/` without any one of its barriers, guards and
bounds.

`python -m tests.inspect.all_removals [--verify] [FILE ...]` runs them all, and prints counts for each file and what is missed.
Results are kept in ATTNGEN_TEST_CACHE, by the text of the file, the emulated device and the problem.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from unittest.mock import patch

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.cache.disk_cache import digest
from attngen.device.emulated import EmulatedDevice, EmulationError
from attngen.device.emulated import device as emulated
from attngen.device.emulated.build import runtime_digest
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect.checking import Kernel
from attngen.inspect.few_heads import few_heads_of, text_for
from attngen.inspect.known import Known
from attngen.inspect.ladder import kernels
from attngen.inspect.prepare import compile_text, plan_for
from attngen.inspect.run_trial import run_trial
from attngen.inspect.trial import Fixed
from attngen.inspect.trials import choose_trials
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec
from tests.inspect.removals_without_effect import reason_of, stale
from tests.left_out import NOTHING
from tests.removals import CHOSEN, Emitted

RUNAWAY = 8  # times the accesses of the right kernel: a loop that makes more is taken for endless


@dataclass(frozen=True, slots=True)
class File:
    """A file of `generated/`: its spec and plan."""

    spec: AttentionSpec
    plan: Plan
    program: Program

    @property
    def name(self) -> str:
        return f"{self.program.name}.cu"

    @property
    def kernel(self) -> Kernel:
        plan = self.plan
        return Kernel(plan.keyword, EmulatedDevice(arch=plan.arch.name), plan.wanted, plan.facts.deterministic)


@cache
def files() -> dict[str, File]:
    """The files of `generated/` that a check can run, by name."""
    every = [File(spec, plan, emit(spec, plan)) for spec, plan in kernels()]
    return {one.name: one for one in every}


class Harness:
    """A file's kernel, compiled once, in which any one removal can be chosen; and the problems of a default check: with few
    heads, as a check has them first. A file that fails with few heads is run with all by a check, in more problems."""

    def __init__(self, file: File) -> None:
        self.file, self.emitted = file, Emitted(file.program.text)
        self.removals = self.emitted.removals
        self.spec, self.plan, self.text = file.spec, file.plan, CHOSEN + self.emitted.removable()
        few = few_heads_of(file.spec, file.plan, lambda spec: plan_for(spec, *file.kernel))
        if few is not None and (text := text_for(self.text, file.spec, few[0])) is not None:
            self.spec, self.plan, self.text = *few, text
        self.trials = choose_trials(self.spec, self.plan, Fixed()).trials
        self._known: dict[int, Known] = {}
        self.results = Results(self.text, file.name)

    @cached_property
    def compiled(self) -> CompiledAttention | CompiledBackward:
        return compile_text(self.spec, self.plan, self.file.kernel.device, self.text)

    @cached_property
    def number(self) -> ctypes.c_int:
        kernel = self.compiled.kernel
        assert isinstance(kernel, emulated.EmulatedKernel)
        return ctypes.c_int.in_dll(ctypes.CDLL(str(kernel.library)), "attngen_left_out")

    @cached_property
    def budget(self) -> int:
        """Accesses of a thread, several times those of the right kernel."""
        for exponent in range(16, 33):
            if all(self._run(NOTHING, trial, 2**exponent) != "runaway loop" for trial in range(len(self.trials))):
                return RUNAWAY << exponent
        raise AssertionError("an endless loop")

    def _run(self, number: int, trial: int, budget: int) -> str:
        """What a check says of the kernel without a removal on one problem: the kind of finding, "wrong result", or ""."""
        one = self.trials[trial]
        known = self.known(trial)
        known.compute(self.plan)
        done: Future[None] = Future()
        done.set_result(None)
        self.number.value = number
        with patch.object(emulated, "_budget", lambda *_: budget):
            try:
                comparison, _, _ = run_trial(self.compiled, known, done, one)
            except EmulationError as error:
                return error.kind
            finally:
                self.number.value = NOTHING
        return "" if comparison.passed else "wrong result"

    @cached_property
    def keys(self) -> list[str]:
        """A name of each problem, by the arrays and numbers that the kernel gets."""
        return [self._key(trial) for trial in range(len(self.trials))]

    def _key(self, trial: int) -> str:
        one, problem = self.trials[trial], self.known(trial).poisoned
        setting = one.setting
        arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
        names = [field.name for field in fields(setting) if field.name not in ("draw", "spoils")]
        others = [("params", one.params), ("seed", one.seed), *((name, getattr(setting, name)) for name in names)]
        arrays |= {"dout": self.known(trial).loss.dout} if setting.spoils else {}
        return digest(repr(others), *(f"{name}{array.shape}{array.tobytes()!r}" for name, array in arrays.items()))

    def known(self, trial: int) -> Known:
        if trial not in self._known:
            self._known[trial] = Known(self.spec, self.trials[trial])
        return self._known[trial]

    @cached_property
    def by_cost(self) -> list[int]:
        """The problems, the cheapest first. On each, the whole file is right."""
        seconds = []
        for trial in range(len(self.trials)):
            start = time.perf_counter()
            assert self._run(NOTHING, trial, self.budget) == "", self.trials[trial]
            seconds.append(time.perf_counter() - start)
        return sorted(range(len(seconds)), key=seconds.__getitem__)

    def finding(self, number: int) -> str:
        """What a default check says of the file without a removal, "" if it is called right."""
        keys = self.keys
        before = [self.results.of(number).get(key) for key in keys]
        if any(before):
            return next(filter(None, before))
        for trial in self.by_cost if None in before else ():
            if before[trial] is None:
                found = self._run(number, trial, self.budget)
                self.results.add(number, keys[trial], found)
                if found:
                    return found
        return ""


class Results:
    """What is known from earlier runs: findings by removal and problem."""

    def __init__(self, text: str, name: str) -> None:
        directory = Path(os.environ.get("ATTNGEN_TEST_CACHE", ".test-cache")) / "removals"
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{name}-{digest(text, runtime_digest())[:16]}.json"
        self.known: dict[str, dict[str, str]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def of(self, number: int) -> Mapping[str, str]:
        return self.known.get(str(number), {})

    def add(self, number: int, problem: str, finding: str) -> None:
        self.known.setdefault(str(number), {})[problem] = finding
        whole = self.path.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(self.known))
        whole.replace(self.path)


def report(name: str, verify: bool = False) -> None:
    """Prints what a check says of a file without each of its parts. Removals without effect are run only to `verify` them."""
    start = time.perf_counter()
    harness = Harness(files()[name])
    text, counts = harness.file.program.text, Counter[str]()
    lines = [f"{name}: {what}" for what in stale(name, harness.emitted)]
    for number, removal in enumerate(harness.removals):
        reason = reason_of(name, harness.emitted, removal)
        finding = harness.finding(number) if verify or reason is None else ""
        result = "noticed" if finding else "without effect" if reason else "missed"
        counts[result] += 1
        if result == "missed" or (reason and finding):
            lines.append(
                f"{result}{', said to be without effect' if reason else ''}: {removal.line(text)}: {removal.describe(text)}"
            )
    of = ", ".join(f"{counts[result]} {result}" for result in ("noticed", "without effect", "missed"))
    problems, seconds = len(harness.trials), time.perf_counter() - start
    print(
        f"{name}: {len(harness.removals)} removals: {of}; {problems} problems, {seconds:.0f} s",
        *lines,
        sep="\n    ",
        flush=True,
    )


def main(arguments: list[str]) -> None:
    for name in [one for one in arguments if one != "--verify"] or files():
        report(name, "--verify" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
