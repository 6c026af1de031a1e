"""The backward beside torch's backends and FlexAttention's.

    python benchmarks/backward.py [--only plain,errors] [--rounds N] [--write docs/tables]

Every side is timed as torch.autograd.grad of its own output with the same gradient of the output (randn), the forward not
counted. Unless a part says otherwise: 16384 tokens, 2048 / D heads, randn; all sides in the same rounds, in random order; a
round times a burst of about 12 ms of calls, with the L2 cache flushed before each; ratios are medians of the ratios within each
round. TFLOP/s count five products for each pair that the mask keeps, as if none were computed twice.
"""

from __future__ import annotations

from backward_parts import (
    captured,
    deterministic,
    errors,
    grouped,
    host,
    latent,
    plain,
    portable,
    sizes,
    training,
    variants,
    wide,
)
from parts import run

PARTS = {
    "plain": plain, "grouped": grouped, "deterministic": deterministic, "errors": errors, "variants": variants,
    "captured": captured, "sizes": sizes, "portable": portable, "host": host, "training": training,
    "wide": wide, "latent": latent,
}  # fmt: skip

if __name__ == "__main__":
    run("backward", __doc__, PARTS, rounds=9)
