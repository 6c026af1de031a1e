"""The constants of a file: lines that name its numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConstantLine:
    name: str
    value: int | str  # a number, or how it follows from other constants
    comment: str = ""
    ctype: str = "int"


def thread_grid(row_threads: int, column_threads: int, dims: str, keys: str = "BLOCK_KV") -> list[ConstantLine]:
    """Threads as a grid over a tile of S, or `keys` of it, and over rows of O, of which they have `dims` dimensions."""
    return [
        ConstantLine("ROW_THREADS", row_threads, "the block's threads as a grid over a tile: its rows"),
        ConstantLine("COLUMN_THREADS", column_threads, "and its columns"),
        ConstantLine("ROWS", "BLOCK_Q / ROW_THREADS", "of a thread"),
        ConstantLine("COLUMNS", f"{keys} / COLUMN_THREADS", "keys of a thread in a tile"),
        ConstantLine("DIMS", f"{dims} / COLUMN_THREADS", "dimensions of O of a thread"),
    ]


SLICE = "terms summed by themselves: rounding errors grow with the partial sums (Higham 1993)"
INFINITY = ConstantLine("INF", "__builtin_bit_cast(float, 0x7f800000)", ctype="float")
