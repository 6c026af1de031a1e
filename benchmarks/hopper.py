"""The hopper rung (wgmma, TMA; sm_90a) beside torch's cuDNN backend, and its variants beside FlexAttention.

    python benchmarks/hopper.py [--only plain,errors] [--rounds N] [--write docs/performance.md]

A part is a module of `hopper_parts`, which says what it measures; each row is printed as it is found, each table written as
soon as its part is done, and parts that are left out keep their tables. Where nothing else is said: 16384 tokens, heads
2048 / D, randn; both sides in the same rounds, in random order; a round times a burst of about 12 ms of calls, the L2 cache
flushed before each, and ratios are the medians of those within each round. TFLOP/s are of the pairs that the mask keeps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from hopper_parts import changing, errors, grouped, plain, sizes, sustained, variants, wide
from markers import write_between

from attngen.bench.sweep import where

PARTS = {
    "plain": plain,
    "sustained": sustained,
    "grouped": grouped,
    "variants": variants,
    "changing": changing,
    "sizes": sizes,
    "wide": wide,
    "errors": errors,
}


def chosen(text: str) -> list[str]:
    """The parts that `--only` names."""
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part is called {name}; there are {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen, default=list(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose tables between the markers of a part are replaced")
    options = parser.parse_args()
    kept = {}
    for name in options.only:
        part, rows = PARTS[name], []
        torch.manual_seed(0)  # a part has the same inputs, whichever ran before
        with torch.no_grad():
            for row in part.rows(options.rounds):
                rows.append(row)
                print(json.dumps({"part": name, **row}), flush=True)
        torch.cuda.empty_cache()
        text = f"{where()}, {options.rounds} rounds\n\n{part.table(rows)}"
        print(text, flush=True)
        kept[name] = rows
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1))
        if options.write:
            write_between(options.write, "hopper", text, name)


if __name__ == "__main__":
    main()
