"""docs/ladder.md: the steps of `attngen ladder gpt2` with predictions and counts, and their rates on the GPU.

    python benchmarks/ladder.py --only steps --write docs/ladder.md      needs no GPU
    python benchmarks/ladder.py --only rates --write docs/ladder.md      needs a GPU

Rates are medians of times by CUDA events, the L2 cache flushed before each call, steps in random order within each round.
TFLOP/s count the pairs that the mask keeps, 4 * D operations each; the schedules that follow are measured in the same rounds.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import replace
from pathlib import Path

from markers import write_between

import attngen
from attngen.language import load_file
from attngen.lessons.ladder import counted, program, rungs
from attngen.shipped import spec_directory

LENGTH, HEADS, ROWS = 4096, 16, 256
AFTER = ("tiled", "fused", "wgmma", "hopper")
WORDS = {"sectors": "sectors", "global_read": "bytes of global memory read", "conflicts": "bank conflicts", "mma": "mma",
         "barriers": "barriers"}  # fmt: skip


def steps() -> str:
    """What bounds the step before, the idea, the prediction and the counts of each step."""
    (spec,) = load_file(spec_directory() / "gpt2.attn")
    parts, before = [], None
    for rung in rungs(spec):
        step, t = rung.step, counted(rung, ROWS, ROWS).totals
        what, formula, why = step.predicted
        parts += [f"### {step.number}. {step.title[0].upper()}{step.title[1:]}", ""]
        if before is not None:
            removed, added = rung.changed(before)
            parts += [f"*What bounds step {before.step.number}:* {step.bound}", ""]
            parts += [
                f"*The change*, {removed} lines removed and {added} added (`attngen ladder gpt2 --diff {step.number}`): "
                f"{step.idea}"
            ]
        else:
            parts += [f"*The kernel* (`attngen ladder gpt2 --step 1`): {step.idea}"]
        parts += [
            "",
            f"*Prediction:* {why} {formula} = {eval(formula):,.0f} {WORDS[what]}. *Counted:* {getattr(t, what):,}.",
            "",
        ]
        parts += [
            "| global read | sectors | shared read | wavefronts | conflicts | mma | barriers |",
            "|---:|---:|---:|---:|---:|---:|---:|",
        ]
        numbers = (t.global_read, t.sectors, t.shared_read, t.wavefronts, t.conflicts, t.mma, t.barriers)
        parts += [f"| {' | '.join(f'{n:,}' for n in numbers)} |", ""]
        before = rung
    return "\n".join(parts).rstrip()


def rates(rounds: int) -> str:
    import torch

    from attngen.bench.measure import measure
    from attngen.device.protocol import Launch
    from attngen.device.select import device_by_name

    (spec,) = load_file(spec_directory() / "gpt2.attn")
    device = device_by_name("cuda")
    q, k, v = (torch.randn(1, HEADS, LENGTH, spec.head_dim, device="cuda", dtype=torch.float16) for _ in range(3))
    out, calls, outputs = torch.empty_like(q), {}, {}
    exact = attngen.compile(spec, kernel="fused", device="cuda")(q, k, v)
    sizes = [ctypes.c_int(n) for n in (HEADS, HEADS, LENGTH, LENGTH)]
    for rung in rungs(spec):
        source = replace(program(rung), arch=device.arch)
        kernel = device.compile(source)
        arguments = (*(ctypes.c_void_p(one.data_ptr()) for one in (q, k, v, out)), *sizes)
        grid = (-(-LENGTH // rung.step.rows), HEADS, 1)
        launch = Launch(source.kernels[0], grid, arguments)
        label = f"{rung.step.number}. {rung.step.title}"
        calls[label] = lambda kernel=kernel, launch=launch: kernel.launch((launch,), ())
        calls[label]()
        torch.cuda.synchronize()
        outputs[label] = float((out.float() - exact.float()).abs().max())
    for schedule in AFTER:
        compiled = attngen.compile(spec, kernel=schedule, device="cuda")
        calls[schedule] = lambda compiled=compiled: compiled(q, k, v)
    pairs = HEADS * LENGTH * (LENGTH + 1) // 2
    sizes_of = f"fp16, {HEADS} heads of {spec.head_dim}, {LENGTH} rows and keys, causal"
    about = f"{torch.cuda.get_device_name()}: {sizes_of}; median of {rounds}"
    lines = [f"{about}.", "", "| | ms | TFLOP/s | largest difference from fused |", "|---|---:|---:|---:|"]
    for label, timing in measure(calls, rounds).items():
        tflops = 4 * spec.head_dim * pairs / (timing.median * 1e9)
        difference = f"{outputs[label]:.1e}" if label in outputs else "-"
        lines.append(f"| {label} | {timing.median:.3f} | {tflops:.2f} | {difference} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("steps", "rates"), required=True)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--write", type=Path, help="the page whose part between the markers is replaced")
    options = parser.parse_args()
    text = steps() if options.only == "steps" else rates(options.rounds)
    print(text)
    if options.write:
        write_between(options.write, "ladder", text, options.only)


if __name__ == "__main__":
    main()
