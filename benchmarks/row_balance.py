"""How evenly the rows of a sequence are divided among GPUs: by torch's load balancers and by attngen's, in tiles of the mask.

`python benchmarks/context_parallel.py --only balance` prints this table, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor.experimental import _attention as parallel
from words import markdown

import attngen
from attngen.plan.balance import balanced, slowest, tile_classes, work_of_blocks
from attngen.plan.block_map import Array

BLOCK = 128  # rows and keys of a block: torch's plan allows no other
GPUS = (2, 4, 8)
DRAWS = 5  # draws of lengths of documents
SHORTEST, LONGEST = 64, 0.25  # rows of a document, and the part of the sequence; lengths are uniform in their logarithm
MASKS = {  # name: (mask, whether it reads documents)
    "causal": ("causal", False),
    "causal, window 4096": ("causal and window(4096)", False),
    "documents": ("ids[q] == ids[k]", True),
    "causal documents": ("ids[q] == ids[k] and causal", True),
}
Assign = Callable[[Array, int], Array]  # (work of each block, GPUs) -> the blocks of each GPU


def in_order(work: Array, gpus: int) -> Array:
    return np.arange(len(work)).reshape(gpus, -1)


def head_and_tail(work: Array, gpus: int) -> Array:
    """Part i and part i from the end, of twice as many parts."""
    parts = np.arange(len(work)).reshape(2 * gpus, -1)
    return np.concatenate((parts[:gpus], parts[gpus:][::-1]), 1)


def round_robin(work: Array, gpus: int) -> Array:
    """torch's, of blocks that are sorted by their work."""
    found: Array = parallel._PTRRLoadBalancer.ptrr_scheduling(torch.from_numpy(work), gpus).numpy()
    return found


BALANCERS: dict[str, Assign] = {
    "in order": in_order,
    "torch: head and tail": head_and_tail,
    "torch: round robin": round_robin,
    "attngen": balanced,
}


def documents(length: int, draw: int) -> Array:
    """The number of the document of each row."""
    limits = np.log([SHORTEST, max(LONGEST * length, SHORTEST)])
    lengths = np.exp(np.random.default_rng(draw).uniform(*limits, length // SHORTEST + 1)).astype(int)
    found: Array = np.searchsorted(lengths.cumsum(), np.arange(length), side="right").astype(np.int32)
    return found


@dataclass(frozen=True, slots=True)
class Balance:
    """Tiles of the slowest GPU beside the mean of all, by balancer: the largest of all draws."""

    mask: str
    length: int
    gpus: int
    slowest: dict[str, float]


def works(mask: str, reads_documents: bool, length: int) -> Iterator[Array]:
    """The tiles of each block of rows."""
    inputs: dict[str, Any] = {"ids": ("int32", ("q_len",))} if reads_documents else {}
    spec = attngen.define(dtype="bf16", head_dim=128, mask=mask, inputs=inputs)
    names = {"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": length, "kv_len": length}
    for draw in range(DRAWS if reads_documents else 1):
        arrays = {name: documents(length, draw) for name in inputs}
        yield work_of_blocks(tile_classes(spec, BLOCK, names, arrays))[0]


def balances(lengths: list[int]) -> Iterator[Balance]:
    for length in lengths:
        for name, (mask, reads_documents) in MASKS.items():
            drawn = list(works(mask, reads_documents, length))
            for gpus in GPUS:
                found = {title: max(slowest(work, assign(work, gpus)) for work in drawn) for title, assign in BALANCERS.items()}
                yield Balance(name, length, gpus, found)


def balance_table(rows: list[Balance]) -> str:
    lines = [(row.mask, str(row.length), str(row.gpus), *(f"{found:.3f}" for found in row.slowest.values())) for row in rows]
    return markdown(("tiles: slowest / mean", "S", "GPUs", *BALANCERS), lines)
