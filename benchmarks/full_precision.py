"""fp32 at full precision, and at `precision high`, beside torch's fused and unfused kernels, in one process.

    python benchmarks/full_precision.py [--write docs/tables]

B4 H8 D64, randn; errors are maximal errors against float64. Medians of `--rounds`, in random order, L2 flushed.
"""

from __future__ import annotations

import argparse
import json
from math import prod
from pathlib import Path

import torch
from markers import write_between
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attngen
from attngen.bench.measure import measure
from attngen.torch import Attention, attention

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
PUBLISHED = {128: 2.0, 256: 2.4, 512: 3.3, 1024: 4.4, 2048: 5.6, 4096: 6.6}  # speedup of a teaching project over unfused torch


def case(length: int, causal: bool, rounds: int) -> dict:
    q, k, v = (torch.randn(4, 8, length, 64, device="cuda") for _ in range(3))

    def of(backend):
        def call():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    high = Attention(precision="high", is_causal=causal)
    candidates = {
        "attngen": lambda: attention(q, k, v, is_causal=causal),
        "high": lambda: high(q, k, v),
        "efficient": of(SDPBackend.EFFICIENT_ATTENTION),
        "math": of(SDPBackend.MATH),
    }
    errors = dict.fromkeys(candidates, 0.0)
    for i in range(q.shape[0]):  # float64 scores of one batch at a time
        exact = scaled_dot_product_attention(*(t[i : i + 1].double() for t in (q, k, v)), is_causal=causal)
        for name, call in candidates.items():
            errors[name] = max(errors[name], (call()[i : i + 1].double() - exact).abs().max().item())
    times = {name: timing.median for name, timing in measure(candidates, rounds).items()}
    pairs = 32 * (length * (length + 1) / 2 if causal else length * length)
    return {
        "case": f"{'causal' if causal else 'full'} S{length}",
        "length": length,
        "causal": causal,
        "ms": times,
        "errors": errors,
        "tflops": 4 * 64 * pairs / times["attngen"] / 1e9,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| fp32 B4 H8 D64 | attngen, ms | TFLOP/s | efficient, ms | ratio | math, ms | ratio | published "
        "| error | of efficient | of math | high, ms | math's ratio | error |",
        "|" + "---|" * 14,
    ]
    for row in rows:
        ms, errors = row["ms"], row["errors"]
        ratios = [ms[name] / ms["attngen"] for name in ("efficient", "math")]
        lines.append(
            f"| {row['case']} | {ms['attngen']:.3f} | {row['tflops']:.0f} | {ms['efficient']:.3f} | {ratios[0]:.2f} "
            f"| {ms['math']:.3f} | {ratios[1]:.2f} | {'' if row['causal'] else PUBLISHED[row['length']]} "
            f"| {errors['attngen']:.1e} | {errors['efficient']:.1e} | {errors['math']:.1e} "
            f"| {ms['high']:.3f} | {ms['math'] / ms['high']:.2f} | {errors['high']:.1e} |"
        )
    for name, chosen in (("full", [r for r in rows if not r["causal"]]), ("causal", [r for r in rows if r["causal"]])):
        ratios = [r["ms"]["efficient"] / r["ms"]["attngen"] for r in chosen]
        mean = prod(ratios) ** (1 / len(ratios))
        lines.append(f"\nOver the efficient backend, {name}: geometric mean {mean:.2f}, least {min(ratios):.2f}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    plan = attngen.compile(attngen.define(dtype="fp32", head_dim=64), device="cuda").plan
    with torch.no_grad():
        rows = [case(length, causal, options.rounds) for causal in (False, True) for length in LENGTHS]
    where = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds}; schedule {plan.schedule.name}"
    )
    text = f"{where}\n\n{table(rows)}"
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.write:
        write_between(options.write, "full_precision", text)


if __name__ == "__main__":
    main()
