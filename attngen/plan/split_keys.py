"""Keys split over blocks: how many rows of a key/value head make a tile, and over how many blocks their keys are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.formulas import ceil_div, larger, select, smaller

MOST_SPLITS = 128  # the kernel that joins them reads a row of each
INVARIANT_KEYS = 512  # per split, if its length does not depend on the batch
WAVES = 8  # rounds of blocks that are considered
START = 1  # cost of starting a block, in rounds of its warps over keys: the time until its first keys arrive


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """The number of tiles of `rows` packed rows of a key/value head: the rows of all query heads that share it."""

    rows: int

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """0 without heads or rows."""
        return ceil_div(sizes["q_len"] * (sizes["q_heads"] // larger(sizes["kv_heads"], 1)), self.rows)

    def __str__(self) -> str:
        return f"ceil(q_len * group_size / {self.rows})"


@dataclass(frozen=True, slots=True)
class Splits:
    """The number of blocks over which the keys of a tile of rows are split.

    A block reads `keys` keys in a round. `blocks`, those that a multiprocessor holds, is 0 if the number depends on kv_len
    alone: then each split has about `keys` keys. Otherwise it is the number whose blocks finish first, if they run in waves:
    all multiprocessors are busy in each wave but the last, and each block starts with a wait.
    """

    rows: int
    keys: int
    blocks: int

    words: ClassVar[str] = "blocks over which the keys of a tile of rows are split"  # the comment beside the parameter

    def __call__(self, sizes: Mapping[str, int]) -> int:
        rounds = larger(ceil_div(sizes["kv_len"], self.keys), 1)
        most = smaller(rounds, MOST_SPLITS)
        if not self.blocks:
            return most
        tiles = sizes["batch"] * sizes["kv_heads"] * PackedTiles(self.rows)(sizes)
        at_once, some_tiles = self.blocks * sizes["multiprocessors"], larger(tiles, 1)
        best, least = most, None
        for wave in range(1, WAVES + 1):  # the numbers grow, and of equally good ones the least is taken
            splits = smaller(larger(wave * at_once // some_tiles, 1), most)
            time = ceil_div(tiles * splits, at_once) * (ceil_div(rounds, splits) + START)
            best, least = (splits, time) if least is None else (select(time < least, splits, best), smaller(time, least))
        return select(tiles > 0, best, most)

    def __str__(self) -> str:
        return "splits"
