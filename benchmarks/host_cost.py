"""What a call costs the host, in four parts.

    python benchmarks/host_cost.py [--only calls,lengths,plans,imports] [--write docs/tables]

calls: attngen's ways of calling, beside torch's, in one process. Microseconds a call, median of batches of calls that are
queued without waiting; the problem (B1 H4 S64 D64 bf16) is so small that the GPU is never behind.

lengths: calls whose length was not seen before, as a model that generates makes them. Planning, checks and arguments are
measured with and without a GPU, whole calls with one. The figures are those of a host's processor, which the table names.

plans: the first plan of a process, for each shipped spec: milliseconds of CPU time, imports and the spec's text apart. The plan
of its backward comes after it in the same process.

imports: seconds of CPU time of fresh processes. All but the first of a row find compiled templates and kernels on disk.

Fresh processes run with their bytecode, as pip installs packages.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from installed import Installed, installed
from markers import write_between

import attngen
from attngen.device import arrays
from attngen.device.arrays import ArrayView, view
from attngen.plan import ARCHES, Problem
from attngen.schedules import choose
from attngen.torch import Attention, attention
from attngen.torch.description import standard_text
from attngen.torch.operator import attention_operator

CALLS = 200


def batch(function: Callable[[], object]) -> float:
    """Microseconds a call of CALLS calls, nothing waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / CALLS


def candidates() -> dict[str, Callable[[], object]]:
    q, k, v = torch.randn(3, 1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    slopes = torch.ones(4, device="cuda")
    layer = Attention(mask="causal and q - k < n", params={"n": ("int", 32)})
    alibi = Attention(mask="causal", score="alibi(slopes)", inputs={"slopes": ("fp32", ("heads",))})
    text = standard_text("auto", True, None, False, q.dtype, 64, 64, None)
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=64, mask="causal"), device="cuda")
    out = torch.empty_like(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "torch: q + k": lambda: q + k,
        "torch: empty_like(q)": lambda: torch.empty_like(q),
        "torch: scaled_dot_product_attention": lambda: sdpa(q, k, v, is_causal=True),
        "attngen: torch.ops.attngen.attention": lambda: attention_operator(q, k, v, text),
        "attngen: attngen.torch.attention": lambda: attention(q, k, v, is_causal=True),
        "attngen: Attention with a param": lambda: layer(q, k, v),
        "attngen: Attention with an input": lambda: alibi(q, k, v, slopes=slopes),
        "attngen: attngen.compile(spec)(q, k, v)": lambda: compiled(q, k, v),
        "attngen: attngen.compile(spec)(q, k, v, out=out)": lambda: compiled(q, k, v, out=out),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal and window(256)"},
    "documents": {"mask": "causal and same_document(ids)", "inputs": {"ids": ("int32", ("batch", "kv_len"))}},
    "ALiBi": {"mask": "causal", "score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}},
}
BATCH, HEADS, SIZE = 1, 4, 64
LENGTHS = range(1000, 1300)


def each(function: Callable[[int], object]) -> float:
    """Microseconds of `function` at a length that it has not seen before, the median of LENGTHS."""
    times = []
    for length in (999, *LENGTHS):
        start = time.perf_counter()
        function(length)
        times.append(1e6 * (time.perf_counter() - start))
    return median(times[1:])


class Nowhere:
    """A device that compiles and launches nothing: what is left of a call is the host's part."""

    name, arch, multiprocessors = "emulated", "sm_90a", 132

    def __init__(self) -> None:
        self.source: Any = None

    def compile(self, source: Any) -> Nowhere:
        self.source = source
        return self

    def launch(self, *launches: Any) -> None:
        pass


@contextmanager
def unfilled() -> Iterator[None]:
    """Outputs of calls on the CPU are not filled with NaN, as on a GPU they are not."""
    filled = arrays._empty
    arrays._empty = lambda like, shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype.torch))
    try:
        yield
    finally:
        arrays._empty = filled


def processor() -> str:
    """The model of the host's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def captured(names: dict[str, Any], device: str, length: int) -> dict[str, torch.Tensor]:
    """The inputs called `names`, at `length`."""
    made = {"ids": lambda: torch.zeros(BATCH, length, dtype=torch.int32), "slopes": lambda: torch.ones(HEADS)}
    return {name: made[name]().to(device) for name in names}


def new_lengths(described: dict[str, Any]) -> list[float | None]:
    """Of one variant: the first plan in milliseconds of CPU time; in microseconds a new length's plan, the same with checks and
    arguments, those of its backward, and its whole call through torch and past it, None without a GPU."""
    inputs = described.get("inputs", {})
    spec = attngen.define(dtype="bf16", head_dim=SIZE, **described)
    arch = ARCHES["sm_90a"]
    start = time.process_time()
    choose(spec, arch)
    first = 1e3 * (time.process_time() - start)
    choose(spec, arch, None, Problem(HEADS, 20_000, 20_000, 132))  # the plan of long rows
    plan = each(lambda length: choose(spec, arch, None, Problem(BATCH * HEADS, length, length, 132)))
    somewhere = attngen.compile(spec, device=Nowhere())
    held = {name: torch.empty(BATCH, HEADS, LENGTHS[-1], SIZE, dtype=torch.bfloat16) for name in "qkv"}
    named = {length: captured(inputs, "cpu", length) for length in (999, *LENGTHS)}

    def bind(length: int) -> None:
        given: dict[str, ArrayView] = {name: view(tensor[:, :, :length], name) for name, tensor in held.items()}
        given |= {name: view(tensor, name) for name, tensor in named[length].items()}
        somewhere.bind(given, {})

    backward = somewhere.gradients()
    rows = {"dout": held["q"], "out": held["q"], **{name: held["q"][..., 0].float() for name in ("lse", "lse_rest")}}
    read = {t.argument for t in backward.source.of_role("input")}

    def bind_backward(length: int) -> None:
        given = {name: tensor[:, :, :length] for name, tensor in {**held, **rows}.items() if name in read}
        backward.bind({name: view(tensor, name) for name, tensor in {**given, **named[length]}.items()}, {})

    with unfilled():
        bound, bound_backward = each(bind), each(bind_backward)
    return [
        first,
        plan,
        bound,
        bound_backward,
        *(whole_calls(described) if torch.cuda.is_available() else (None, None)),
    ]


def whole_calls(described: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of whole calls at new lengths: through torch's operator, and by the way of other libraries' arrays."""
    inputs = described.get("inputs", {})
    q, k, v = (torch.empty(BATCH, HEADS, 20_000, SIZE, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    layer = Attention(**described)
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=SIZE, **described), device="cuda")
    elsewhere = replace(compiled, on_tensors=None)
    found = []
    for function in (layer, elsewhere):
        function(q, k, v, **captured(inputs, "cuda", 20_000))  # compiles the plan of long rows
        named = {length: captured(inputs, "cuda", length) for length in (999, *LENGTHS)}
        torch.cuda.synchronize()
        found.append(each(lambda n: function(q[:, :, :n], k[:, :, :n], v[:, :, :n], **named[n])))  # noqa: B023
        torch.cuda.synchronize()
    return found[0], found[1]


def lengths() -> str:
    """The table of new lengths."""
    all_of_it = "plan, checks and arguments, us"
    columns = ("first plan, ms", "plan, us", all_of_it, f"backward: {all_of_it}", "call through torch, us", "other call, us")
    lines = [f"| a new length | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for name, described in VARIANTS.items():
        figures = ["-" if f is None else f"{f:.1f}" for f in new_lengths(described)]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "without a GPU"
    return (
        f"{where}, {processor()}, torch {torch.__version__}, B{BATCH} H{HEADS} D{SIZE} bf16, "
        f"median of {len(LENGTHS)} lengths\n\n" + "\n".join(lines)
    )


PLANNED_FOR = ("sm_90a", "sm_80")
FIRST_PLAN = """
import json, sys, time
times = [time.process_time()]
from attngen.language import load_file
from attngen.plan import ARCHES
from attngen.schedules import choose
import attngen.schedules.backward
times.append(time.process_time())
spec = load_file(sys.argv[1])[0]
times.append(time.process_time())
choose(spec, ARCHES[sys.argv[2]])
times.append(time.process_time())
choose(spec, ARCHES[sys.argv[2]], direction="backward")
times.append(time.process_time())
print(json.dumps([1e3 * (after - before) for before, after in zip(times, times[1:])]))
"""


def first_plan(version: Installed, spec: Path, arch: str, rounds: int, cache: str) -> list[float]:
    """Milliseconds of imports, the spec's text, its first plan and that of its backward, medians of processes."""
    runs = [json.loads(version.output(["-c", FIRST_PLAN, str(spec), arch], cache)) for _ in range(rounds)]
    return [median(each) for each in zip(*runs, strict=True)]


def plans(version: Installed, rounds: int = 3) -> str:
    """The table of first plans."""
    columns = [f"{arch}: {what}" for arch in PLANNED_FOR for what in ("first plan", "backward's")]
    lines = [f"| ms of CPU time | imports | text | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 3)}"]
    for path in sorted((version.root / "specs").glob("*.attn")):
        with tempfile.TemporaryDirectory() as cache:
            found = [first_plan(version, path, arch, rounds, cache) for arch in PLANNED_FOR]
        figures = [*(max(each) for each in zip(*(f[:2] for f in found), strict=True)), *(ms for f in found for ms in f[2:])]
        lines.append(f"| {path.stem} | {' | '.join(f'{ms:.1f}' for ms in figures)} |")
    return f"Python {sys.version.split()[0]}, median of {rounds} processes\n\n" + "\n".join(lines)


CALL = """
import time, torch, warnings
warnings.simplefilter("ignore")
q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
import attngen.torch
start = time.process_time()
attngen.torch.attention(q, q, q, is_causal=True)
print(time.process_time() - start)
"""
COMMANDS = {
    "import attngen": ["-c", "import attngen"],
    "import torch": ["-c", "import torch"],
    "import attngen.torch": ["-c", "import attngen.torch"],
    "attngen --help": ["-m", "attngen", "--help"],
    "attngen list": ["-m", "attngen", "list"],
    "attngen build gpt2": ["-m", "attngen", "build", "gpt2", "-o", "built"],
    "first call with tensors on the CPU, imports apart": ["-c", CALL],
}


def cpu_seconds(version: Installed, command: list[str], cache: str) -> float:
    """CPU seconds of a process and of what it starts; those that it prints, if it prints any."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = version.output(command, cache)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if command == ["-c", CALL]:
        return float(said)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(version: Installed, rounds: int = 5) -> str:
    """The table of fresh processes."""
    lines = ["| s of CPU time | first, with an empty cache | later ones |", "|---|---|---|"]
    for what, command in COMMANDS.items():
        with tempfile.TemporaryDirectory() as cache:
            first, *later = (cpu_seconds(version, command, cache) for _ in range(1 + rounds))
        lines.append(f"| {what} | {first:.2f} | {median(later):.2f} |")
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    return f"{versions}, median of {rounds} processes\n\n" + "\n".join(lines)


def calls(rounds: int) -> dict[str, float]:
    """Microseconds of each way of calling."""
    functions = candidates()
    for function in functions.values():
        batch(function)
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for _ in range(rounds):
            for name in random.sample(sorted(functions), len(functions)):
                times[name].append(batch(functions[name]))
    return {name: median(values) for name, values in times.items()}


def table(found: dict[str, float], rounds: int) -> str:
    lines = ["| call | us |", "|---|---|", *(f"| {name} | {value:.1f} |" for name, value in found.items())]
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {rounds} batches of {CALLS} calls"
    return f"{where}\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="calls,lengths,plans,imports", help="parts, separated by commas")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write the figures of calls here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose tables between the markers are replaced")
    options = parser.parse_args()
    parts = options.only.split(",")
    if "calls" in parts and torch.cuda.is_available():
        found = calls(options.rounds)
        show("calls", table(found, options.rounds), options.write)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    if "lengths" in parts:
        show("lengths", lengths(), options.write)
    if "plans" in parts or "imports" in parts:
        with installed() as (version,):
            if "plans" in parts:
                show("plans", plans(version), options.write)
            if "imports" in parts:
                show("imports", imports(version), options.write)


def show(part: str, text: str, page: Path | None) -> None:
    print(f"{text}\n")
    if page is not None:
        write_between(page, "host_cost", text, part)


if __name__ == "__main__":
    main()
