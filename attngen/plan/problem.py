"""`Problem`: the sizes of a call, as far as a plan may depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attngen.plan.formulas import larger


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: `rows` query rows and `keys` key rows for each of `heads` query heads (those of the whole batch), of which
    `group` share a key head."""

    heads: int
    rows: int
    keys: int
    multiprocessors: int  # SMs of the device
    group: int = 1

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Problem:
        """That of a call, by the sizes of its dimensions and the number of SMs."""
        heads, group = sizes["batch"] * sizes["q_heads"], sizes["q_heads"] // larger(sizes["kv_heads"], 1)
        return cls(heads, sizes["q_len"], sizes["kv_len"], sizes["multiprocessors"], group)
