"""Numbers of fp32 as three terms of bf16, which a kernel before the others writes."""

from __future__ import annotations

TERMS = 3  # numbers of bf16, whose mantissas have 8 bits each
PRODUCTS = 6  # products of terms that are computed, of the 9 there are: the others are less than a rounding error of fp32
SLAB = 64  # columns of bf16 that the swizzle of 128 bytes permutes


def term_columns(head_dim: int) -> int:
    """The columns of a row of one term: whole slabs, filled up with zeros."""
    return -(-head_dim // SLAB) * SLAB
