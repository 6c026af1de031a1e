"""Tiles whose products the warps of a block share, where a thread has no registers for all columns of O: a warp computes scores
of some rows and keys, and multiplies the weights of the whole tile with its own columns of V."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.plan import LARGEST_HEAD
from attngen.plan.shared_memory import COLUMN, SharedBuffer
from attngen.plan.tile import Tile
from attngen.schedules.parts.mma import MMA_ROWS, chunk, product_dtype, v_step, width_of_v
from attngen.spec.attention import AttentionSpec

WHY_COLUMNS = "each has its own columns of O, as a thread has no registers for all; weights are handed on in shared memory"


def is_shared(spec: AttentionSpec) -> bool:
    """Whether the warps of a block share its tiles: the heads are wider than a thread has registers for."""
    return max(spec.head_dim, spec.head_dim_v) > LARGEST_HEAD


def row_warps(tile: Tile) -> int:
    """Parts of a tile's rows, each of a warp."""
    return tile.block_q // MMA_ROWS


def key_warps(tile: Tile) -> int:
    """Parts of a tile's keys, each of a warp: of 16 keys, or more if there are fewer warps than such parts."""
    return min(tile.block_kv // MMA_ROWS, tile.warps // row_warps(tile))


def width(spec: AttentionSpec, tile: Tile) -> int:
    """The columns of V in shared memory: if warps have columns, whole steps of each."""
    step = v_step(spec) * tile.warps
    return -(-spec.head_dim_v // step) * step if is_shared(spec) else width_of_v(spec)


def columns(spec: AttentionSpec, tile: Tile) -> int:
    """The columns of O of 16 rows that take as many registers of a thread as what its warp has."""
    return row_warps(tile) * width(spec, tile) // tile.warps


def buffers(spec: AttentionSpec, tile: Tile, in_units: bool = False) -> Iterator[SharedBuffer]:
    """What warps hand on: weights, of a softmax the state of rows, and of sums `in_units` of their row the units."""
    q, kv = tile.block_q, tile.block_kv
    use = "the weights of a tile"
    yield SharedBuffer(name="P", element=product_dtype(spec).name, shape=(q, kv), use=use, pad=chunk(spec), read=COLUMN)
    if spec.normalize == "softmax":
        parts = (key_warps(tile), q)
        yield SharedBuffer(name="MAX", element="float", shape=parts, use="the maximum of each warp's keys")
        yield SharedBuffer(name="SUM", element="float", shape=parts, use="the sum of their weights")
    if spec.normalize == "softmax" or in_units:
        yield SharedBuffer(name="ALPHA", element="float", shape=(q,), use="what a tile multiplies earlier sums by")
    if in_units:
        use = "the largest products of weights and scales of V, of each warp's keys"
        yield SharedBuffer(name="LARGEST", element="float", shape=(key_warps(tile), q), use=use)
        yield SharedBuffer(name="UNIT", element="float", shape=(q,), use="the unit of each row's sums, in the end")
