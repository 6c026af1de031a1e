"""The shared memory of a block of the decode schedule."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.facts import SpecFacts
from attngen.plan.own import Copies
from attngen.plan.shared_memory import COLUMN, NEITHER, SharedBuffer
from attngen.plan.tile import Tile
from attngen.schedules.decode import shares
from attngen.schedules.parts import mma, tile_of_block
from attngen.schedules.parts.mma import chunk, operands, padded_head_dim
from attngen.schedules.parts.wgmma import slab_tiles, slabs
from attngen.spec.attention import AttentionSpec

OUTPUT_PAD = 8  # fp32 numbers at the end of each row of O in shared memory


def buffers(facts: SpecFacts, copies: Copies, tile: Tile) -> tuple[SharedBuffer, ...]:
    """All buffers. Stages are those of a warp, or of the block if its warps have columns of O."""
    spec = facts.spec
    d, pad, element, apart = padded_head_dim(spec), chunk(spec), spec.dtype.name, shares.warps_have(spec) == "keys"
    visited = SharedBuffer(name="VISITED", element="int", shape=(tile.warps, tile.stages), use="the tiles that stages hold")
    own = owners(spec, tile)
    barriers = SharedBuffer(
        name="BARRIERS", element="mbarrier", shape=(*own, tile.stages), use="of each stage: its tiles have arrived"
    )
    q = SharedBuffer(name="Q", element=element, shape=(tile.block_q, d), use="the block's rows", pad=pad, read=COLUMN)
    kv: tuple[SharedBuffer, ...] = key_buffers(spec, copies, tile)
    by_tma = copies == "tma"
    rows = tile.block_q * (tile.warps if apart else 1)
    sums = rows * (tile_of_block.width(spec, tile) + OUTPUT_PAD) * 4
    under_sums = kv if apart else (*kv, q)
    if (missing := sums - sum(b.bytes for b in under_sums)) > 0:  # narrow keys of 8 bits have no room for the sums of O
        kv = (*kv, SharedBuffer(name="MORE", element="byte", shape=(missing,), use="the end of the sums of O, after K and V"))
    return (
        *((*kv, q) if by_tma else (q, *kv)),  # slabs begin at multiples of 1024 bytes
        *([visited] if facts.bounds.per_tile else []),
        *(row_state(spec, tile) if apart else tile_of_block.buffers(spec, tile, shares.in_units(spec))),
        *([barriers] if by_tma else []),
    )


def owners(spec: AttentionSpec, tile: Tile) -> tuple[int, ...]:
    """The extent of what each warp has of its own; none of what the block has."""
    return (tile.warps,) if shares.warps_have(spec) == "keys" else ()


def key_buffers(spec: AttentionSpec, copies: Copies, tile: Tile) -> tuple[SharedBuffer, ...]:
    """The stages of K and of V: slabs of columns, or padded rows. Values that are a part of keys have none."""
    element, d, dv = spec.dtypes["k"].name, padded_head_dim(spec), tile_of_block.width(spec, tile)
    own = owners(spec, tile)
    of_k, of_v = (f"the {what} of {tile.stages} tiles{' of each warp' if own else ''}" for what in ("keys", "values"))
    if copies == "tma":
        k_shape, v_shape = ((*own, tile.stages, slabs(n), tile.block_kv) for n in (d, dv))
        k, v = slab_tiles("K", element, k_shape, of_k), slab_tiles("V", element, v_shape, of_v)
    else:
        shape, pad = (*own, tile.stages, tile.block_kv), mma.CHUNK_BYTES // spec.dtypes["k"].bytes
        v_read = NEITHER if operands(spec).split else COLUMN
        k = SharedBuffer(name="K", element=element, shape=(*shape, d), use=of_k, pad=pad, read=COLUMN)
        v = SharedBuffer(name="V", element=element, shape=(*shape, dv), use=of_v, pad=pad, read=v_read)
    return (k,) if shares.values_in_keys(spec, copies, tile) else (k, v)


def row_state(spec: AttentionSpec, tile: Tile) -> Iterator[SharedBuffer]:
    """What the warps of a block tell each other of a row in the end."""
    if spec.normalize == "softmax":
        yield SharedBuffer(name="MAX", element="float", shape=(tile.warps, tile.block_q), use="the maximum of each warp's keys")
        yield SharedBuffer(name="SUM", element="float", shape=(tile.warps, tile.block_q), use="the sum of their weights")
