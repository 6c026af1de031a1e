"""The rates of the shipped specs for docs/gallery.md, each by the kernel that `auto` selects on this GPU.

    python benchmarks/gallery.py [--write docs/gallery.md]

Median milliseconds of a call by CUDA events, the L2 cache flushed before each call, all specs in random order within each
round, randn inputs, captured tensors with sample values; TFLOP/s count the pairs that the mask keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from markers import write_between

import attngen
from attngen.inspect.call import defaults
from attngen.language import load_file
from attngen.plan.products import operations_of_a_pair
from attngen.shipped import spec_directory

TOKENS, LENGTH = 4096, 2048


def table(about: str, found: Mapping[str, tuple[str, str, float, float]]) -> str:
    """Rows (shape, schedule, milliseconds, TFLOP/s) by spec."""
    lines = [f"{about}.", "", "| spec | shape | kernel | ms | TFLOP/s |", "|---|---|---|---:|---:|"]
    for name, (shape, kernel, ms, tflops) in found.items():
        lines.append(f"| [{name}](#{name}) | {shape} | {kernel} | {ms:.3f} | {tflops:.0f} |")
    return "\n".join(lines)


def measured(rounds: int) -> str:
    import torch

    from attngen.bench.measure import measure
    from attngen.bench.sweep import cases, problem
    from attngen.reference.torch_oracle import allowed_pairs

    calls, rows = {}, {}
    for path in sorted(spec_directory().glob("*.attn")):
        for spec in load_file(path):
            (case,) = cases(spec, [LENGTH], [], [], False, TOKENS)
            q, k, v, inputs, own = problem(case, defaults(spec))
            kernel = attngen.compile(spec, device="cuda")
            given = (q, k, v) if spec.values is None else (q, k)
            calls[spec.name] = lambda kernel=kernel, given=given, named=inputs | own: kernel(*given, **named)
            calls[spec.name]()
            operations = operations_of_a_pair(spec) * allowed_pairs(spec, q, k, inputs, own)
            rows[spec.name] = (case.title.removesuffix(" masked"), kernel.plan.keyword, operations)
    timings = measure(calls, rounds)
    found = {}
    for name, (shape, kernel, operations) in rows.items():
        ms = timings[name].median
        found[name] = (shape.replace(" masked", ""), kernel, ms, operations / (ms * 1e9))
    return table(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {rounds}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", type=Path, help="the page whose table between the markers is replaced")
    options = parser.parse_args()
    text = measured(options.rounds)
    print(text)
    if options.write:
        write_between(options.write, "gallery", text)


if __name__ == "__main__":
    main()
