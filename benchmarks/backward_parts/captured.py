"""Variants whose captured tensor has a gradient too, which FlexAttention adds up with atomics."""

from __future__ import annotations

from collections.abc import Iterator

from cell import Row

from backward_parts import variants

CASES = ("ALiBi", "relative bias")


def rows(rounds: int) -> Iterator[Row]:
    for name in CASES:
        yield variants.beside_flex(name, rounds, with_captured=True) | {"case": f"{name}, with its gradient"}


table = variants.table
