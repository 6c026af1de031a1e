"""The hopper schedule (wgmma, TMA; sm_90a) beside torch's cuDNN backend, and its variants beside FlexAttention.

    python benchmarks/hopper.py [--only plain,errors] [--rounds N] [--write docs/tables]

Each part is a module of `hopper_parts` that describes what it measures. Rows are printed as they are measured, and a table is
written when its part is complete; other parts keep their tables. Unless a part says otherwise: 16384 tokens, 2048 / D heads,
randn; both sides in the same rounds, in random order; a round times a burst of about 12 ms of calls, with the L2 cache flushed
before each; ratios are medians of the ratios within each round. TFLOP/s count the pairs that the mask keeps.
"""

from __future__ import annotations

from hopper_parts import (
    changing,
    dropout,
    errors,
    fp32,
    grouped,
    lengths,
    plain,
    products_of_8_bits,
    quantized,
    sizes,
    sums_of_8_bits,
    sustained,
    variants,
    wide,
)
from parts import run

PARTS = {
    "plain": plain,
    "sustained": sustained,
    "grouped": grouped,
    "variants": variants,
    "changing": changing,
    "dropout": dropout,
    "sizes": sizes,
    "lengths": lengths,
    "errors": errors,
    "wide": wide,
    "quantized": quantized,
    "products_of_8_bits": products_of_8_bits,
    "sums_of_8_bits": sums_of_8_bits,
    "fp32": fp32,
}

if __name__ == "__main__":
    run("hopper", __doc__, PARTS, rounds=9)
