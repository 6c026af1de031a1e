"""The portable fused kernel (mma.sync, sm_80 and later) beside torch's FlashAttention-2 and FlexAttention.

    python benchmarks/portable.py [--only plain,variants] [--rounds N] [--write docs/tables]

Each part is a module of `portable_parts` that describes what it measures. Rows are printed as they are measured, and a table is
written when its part is complete; other parts keep their tables. Unless a part says otherwise: 16384 tokens, 2048 / D heads,
randn. Times are medians by CUDA events, with the L2 cache flushed before each call and candidates in random order; for
variants, medians of bursts, and of the ratios within each round. TFLOP/s count the pairs that the mask keeps.
"""

from __future__ import annotations

from parts import run
from portable_parts import between, plain, sustained, variants

PARTS = {"plain": plain, "between": between, "variants": variants, "sustained": sustained}

if __name__ == "__main__":
    run("portable", __doc__, PARTS, rounds=21)
