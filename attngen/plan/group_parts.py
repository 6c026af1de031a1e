"""Over how many work tiles the query heads of a group are divided, where blocks of keys alone are too few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.formulas import ceil_div, larger, smaller
from attngen.plan.mask_bounds import MaskBounds
from attngen.spec.expr import names_in


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The number of parts of a group of query heads, each of which is a work tile with a block of `keys` keys.

    As many as give each multiprocessor at most `rounds` work tiles; of numbers whose largest parts have equally many heads, the
    least.
    """

    keys: int
    rounds: int

    words: ClassVar[str] = "parts of a group of query heads, each with work tiles of its own"  # beside the parameter

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """At least 1."""
        tiles = sizes["batch"] * sizes["kv_heads"] * ceil_div(sizes["kv_len"], self.keys)
        group_size = larger(sizes["q_heads"] // larger(sizes["kv_heads"], 1), 1)
        most = larger(smaller(self.rounds * sizes["multiprocessors"] // larger(tiles, 1), group_size), 1)
        return ceil_div(group_size, ceil_div(group_size, most))

    def __str__(self) -> str:
        return "parts"


def rounds_of(bounds: MaskBounds) -> int:
    """The work tiles of a multiprocessor up to which parts are worth their cost, for blocks of keys with these bounds of rows.

    Blocks of about equally many rows fill a round. Where one end of the rows moves with the block, as under a causal mask, the
    longest block has twice the mean: one round would end with it, a second one of shorter blocks is balanced.
    """
    moving = [end for end in (bounds.begin, bounds.end) if names_in(end) & bounds.axis.other.block_names]
    return 2 if len(moving) == 1 and not bounds.per_tile else 1
