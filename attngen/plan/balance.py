"""Assignment of blocks of rows to processes that share one attention, so that each has about as many tiles to compute.

Masks give rows different work: of a causal one the last rows have the most, of documents those of the longest. The work of a
block of rows is the number of tiles that its mask does not leave empty, as the kernels classify them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attngen.plan.block_map import EMPTY, PARTIAL, Array, classify_tiles
from attngen.plan.mask_bounds import mask_bounds
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import names_in

EVEN = 1.01  # slowest / mean of parts that are left as they are
ENOUGH = 1.001  # slowest / mean at which no more blocks are exchanged
MOST_EXCHANGES = 64  # for each process


def tile_classes(spec: AttentionSpec, block: int, names: Mapping[str, int | float], inputs: Mapping[str, Array]) -> Array:
    """The class of each tile of `block` rows by `block` keys, EMPTY, PARTIAL or FULL: [batch, q_heads, blocks, tiles].

    Batch and heads are 1 if the mask does not depend on them. `names` gives sizes and params, `inputs` captured arrays.
    """
    used = names_in(spec.mask) if spec.mask is not None else frozenset()
    bounds = mask_bounds(spec, (block, block))
    batches, heads = (range(int(names[size]) if index in used else 1) for index, size in (("b", "batch"), ("h", "q_heads")))
    return np.array(
        [[classify_tiles(bounds, block, block, {**names, "b": b, "h": h}, inputs) for h in heads] for b in batches], np.int8
    )


def work_of_blocks(classes: Array, partial: float = 1.0) -> Array:
    """The work of each block of rows, summed over heads: [batch, blocks]. A full tile counts 1, a partial one `partial`."""
    visited, tested = (classes != EMPTY).sum((1, 3)), (classes == PARTIAL).sum((1, 3))
    work: Array = visited + (partial - 1.0) * tested
    return work


def balanced(work: Array, ranks: int) -> Array:
    """The blocks of each rank, ascending: [ranks, blocks / ranks]. Each rank has as many blocks as the others.

    Blocks in order, if these are even. Otherwise each block, from the one with the most work on, goes to the rank with the
    least that still has room (Graham 1969, longest processing time first, with as many blocks for each); then the rank with
    the most work and the one with the least exchange the two blocks that bring them closest, until no exchange helps.
    """
    each = len(work) // ranks
    in_order = np.arange(len(work)).reshape(ranks, each)
    if slowest(work, in_order) <= EVEN:
        return in_order
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    for block in np.argsort(-work, kind="stable"):
        rank = int(np.argmin(loads))
        owned[rank].append(int(block))
        loads[rank] = loads[rank] + work[block] if len(owned[rank]) < each else np.inf  # no room
    found = np.array(owned)
    for _ in range(MOST_EXCHANGES * ranks):
        loads = work[found].sum(1)
        high, low = int(np.argmax(loads)), int(np.argmin(loads))
        if loads[high] <= ENOUGH * loads.mean():
            break
        gap = loads[high] - loads[low]
        differences = work[found[high]][:, None] - work[found[low]]
        one, other = np.unravel_index(np.argmin(np.abs(differences - gap / 2)), differences.shape)
        if not 0 < differences[one, other] < gap:
            break
        found[high, one], found[low, other] = found[low, other], found[high, one]
    return np.sort(found, axis=1)


def slowest(work: Array, assigned: Array) -> float:
    """The work of the rank that has the most, divided by the mean of all. `work` [..., blocks], `assigned` [..., ranks, n]; the
    work of a rank is that of all its batches."""
    loads = np.take_along_axis(work[..., None, :], assigned, -1).sum(-1).reshape(-1, assigned.shape[-2]).sum(0)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
