"""`Tile`: the shape of a block's work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, keys, pipeline stages and warps of a block."""

    block_q: int
    block_kv: int
    stages: int
    warps: int
