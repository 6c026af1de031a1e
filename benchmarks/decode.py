"""Decoding, one query row and a long dense cache, beside torch's backends and FlexAttention, and the rate of reading memory.

    python benchmarks/decode.py [--only plain,paged,variants,quantized,latent,rotation,published] [--rounds N] [--write FILE]

bf16, 32 query heads over 8, D = 128, randn, unless a row says otherwise. Each side is a CUDA graph of calls, each with another
cache, together more than L2 holds; sides run in random order within each round. TB/s count K and V of the keys that the mask
keeps, once for each head of keys. The read rate is that of a large sum, in the same run.
"""

from __future__ import annotations

from decode_parts import latent, paged, plain, published, quantized, rotation, variants
from parts import run

PARTS = {
    "plain": plain, "paged": paged, "variants": variants, "quantized": quantized, "latent": latent, "rotation": rotation,
    "published": published,
}  # fmt: skip

if __name__ == "__main__":
    run("decode", __doc__, PARTS, rounds=9)
