"""Variants whose captured tensor has a gradient too, which FlexAttention adds up with atomics."""

from __future__ import annotations

from collections.abc import Iterator

from cell import Row
from portable_parts.variants import VARIANTS

from backward_parts import variants

OF_ALL_PAIRS = {"bias": ("bf16", ("batch", "heads", "q_len", "kv_len"))}
CASES: dict[str, variants.Variant] = {
    "ALiBi": VARIANTS["ALiBi"],
    "relative bias": VARIANTS["relative bias"],
    "bias of all pairs": ({"score": "s + bias[b, h, q, k]", "inputs": OF_ALL_PAIRS}, "bias"),
}


def rows(rounds: int) -> Iterator[Row]:
    for name, variant in CASES.items():
        yield variants.beside_flex(f"{name}, with its gradient", variant, rounds, with_captured=True)


table = variants.table
