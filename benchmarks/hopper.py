"""The hopper rung (wgmma, TMA; sm_90a) beside torch's cuDNN backend, and its variants beside FlexAttention.

    python benchmarks/hopper.py [--only plain,errors] [--rounds N] [--write docs/performance_tables.md]

A part is a module of `hopper_parts`, which says what it measures; each row is printed as it is found, each table written as
soon as its part is done, and parts that are left out keep their tables. Where nothing else is said: 16384 tokens, heads
2048 / D, randn; both sides in the same rounds, in random order; a round times a burst of about 12 ms of calls, the L2 cache
flushed before each, and ratios are the medians of those within each round. TFLOP/s are of the pairs that the mask keeps.
"""

from __future__ import annotations

from hopper_parts import changing, errors, grouped, lengths, plain, sizes, sustained, variants
from parts import run

PARTS = {
    "plain": plain,
    "sustained": sustained,
    "grouped": grouped,
    "variants": variants,
    "changing": changing,
    "sizes": sizes,
    "lengths": lengths,
    "errors": errors,
}

if __name__ == "__main__":
    run("hopper", __doc__, PARTS, rounds=9)
