"""The portable fused kernel (mma.sync, sm_80 and later) beside torch's FlashAttention-2 and FlexAttention.

    python benchmarks/portable.py [--only plain,variants] [--rounds N] [--write docs/performance_tables.md]

A part is a module of `portable_parts`, which says what it measures; each row is printed as it is found, each table written as
soon as its part is done, and parts that are left out keep their tables. Where nothing else is said: 16384 tokens, heads
2048 / D, randn. Times by CUDA events, L2 flushed before each call, candidates in random order, medians, of variants those of
bursts and of the ratios within each round; TFLOP/s are of the pairs that the mask keeps.
"""

from __future__ import annotations

from parts import run
from portable_parts import between, plain, sustained, variants

PARTS = {"plain": plain, "between": between, "variants": variants, "sustained": sustained}

if __name__ == "__main__":
    run("portable", __doc__, PARTS, rounds=21)
