"""The hopper rung (wgmma, TMA; sm_90a) beside torch's cuDNN backend, and its variants beside FlexAttention.

    python benchmarks/hopper.py [--write docs/performance.md]

Plain attention of 16384 tokens, heads 2048 / D, in bf16, and in fp16 at S = 4096; grouped heads; and the variants of
`benchmarks/portable.py` at their shape. Times by CUDA events, L2 flushed before each call, candidates in random order, medians;
TFLOP/s of the pairs that the mask keeps; errors are the largest against float64.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from markers import write_between
from portable import plain, variant_table

from attngen.bench.sweep import where

CASES = [("bf16", d, m, s) for d in (64, 128, 256) for m in (None, "causal") for s in (1024, 4096, 16384)]
CASES += [("fp16", d, m, 4096) for d in (64, 128, 256) for m in (None, "causal")]


def table(cells: list[dict[str, Any]]) -> str:
    lines = ["| TFLOP/s | attngen | cuDNN | ratio | error | of cuDNN |", "|---|---|---|---|---|---|"]
    ratios = []
    for c in cells:
        t, e = c["tflops"], c["errors"]
        ratios.append(t["attngen"] / t["torch cuDNN"])
        lines.append(
            f"| {c['case']} | {t['attngen']:.0f} | {t['torch cuDNN']:.0f} | {ratios[-1]:.2f} "
            f"| {e['attngen']:.1e} | {e['torch cuDNN']:.1e} |"
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    lines.append(f"\nGeometric mean of the ratios {mean:.3f}, the least {min(ratios):.3f}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose tables between the markers are replaced")
    options = parser.parse_args()
    cells = []
    for case in CASES:
        cells.append(plain(*case, options.rounds, kernel="hopper", against=("torch cuDNN",)))
        print(json.dumps(cells[-1]), flush=True)
    variants, kept = variant_table(options.rounds, kernel="hopper")
    text = "\n\n".join([f"{where()}, median of {options.rounds}", table(cells), variants])
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"plain": cells, "variants": kept}, indent=1))
    if options.write:
        write_between(options.write, "hopper", text)


if __name__ == "__main__":
    main()
