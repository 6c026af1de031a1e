"""Keys split over blocks: how many rows of a key/value head make a tile, and over how many blocks their keys are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
        return -(-sizes["q_len"] * (sizes["q_heads"] // max(sizes["kv_heads"], 1)) // self.rows)

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
        rounds = max(-(-sizes["kv_len"] // self.keys), 1)
        most = min(rounds, MOST_SPLITS)
        tiles = sizes["batch"] * sizes["kv_heads"] * PackedTiles(self.rows)(sizes)
        if not self.blocks or not tiles:
            return most
        at_once = self.blocks * sizes["multiprocessors"]
        possible = {min(max(wave * at_once // tiles, 1), most) for wave in range(1, WAVES + 1)}
        return min(sorted(possible), key=lambda splits: -(-tiles * splits // at_once) * (-(-rounds // splits) + START))

    def __str__(self) -> str:
        return "splits"
