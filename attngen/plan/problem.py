"""`Problem`: the sizes of a call, as far as a plan may depend on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: `rows` query rows and `keys` key rows for each of `heads` query heads (those of the whole batch), of which
    `group` share a key head."""

    heads: int
    rows: int
    keys: int
    multiprocessors: int  # SMs of the device
    group: int = 1
