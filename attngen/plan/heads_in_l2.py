"""How many heads are computed side by side, so that their blocks share keys and values in L2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.facts import SpecFacts
from attngen.plan.formulas import ceil_div, larger, smaller

L2_BYTES = 32 << 20  # keys and values that a section of heads may read


@dataclass(frozen=True, slots=True)
class HeadsInL2:
    """The number of query heads of a section, whose work tiles are numbered together so that they share keys in L2.

    A section has about as many heads of K and V as have `rows` keys together, but at least `least` and at most `most`. All
    sections have about the same number of heads, so that no short one is left to the end.
    """

    rows: int
    least: int
    most: int

    words: ClassVar[str] = "query heads whose blocks are numbered together"  # the comment beside the parameter

    def __str__(self) -> str:
        return "of one group" if self.most == 1 else "by length"

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """For a call in which no size but kv_len is 0."""
        heads = sizes["batch"] * sizes["kv_heads"]
        wanted = larger(smaller(self.rows // larger(sizes["kv_len"], 1), self.most), self.least)
        sections = larger((heads + wanted // 2) // wanted, 1)
        return ceil_div(heads, sections) * (sizes["q_heads"] // larger(sizes["kv_heads"], 1))


def heads_in_l2(facts: SpecFacts) -> tuple[HeadsInL2, str]:
    """The rule for the work tiles of a spec, and the reason.

    If all rows have the same number of keys to visit, a section is the query heads that share keys. Otherwise the bounds are
    measured (docs/experiments.md): with more heads no two blocks of a head run together, with fewer the blocks of long rows are
    far from each other. A wider head has fewer rows in a block.
    """
    if facts.bounds.uniform:
        return HeadsInL2(1, 1, 1), "all rows visit the same keys: the query heads that share keys run together"
    spec = facts.spec
    width = spec.head_dim + spec.head_dim_v
    rule = HeadsInL2(L2_BYTES // (spec.dtype.bytes * width), min(32, 8192 // width), max(64, 16384 // width))
    return rule, f"as many key/value heads as fit {L2_BYTES >> 20} MiB of L2, {rule.least} to {rule.most}"
