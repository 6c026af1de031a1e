"""What a tile of the fused schedule on tensor cores needs: shared memory, threads; what a variant reads of captured tensors."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.captured_staging import NOTHING, Staged
from attngen.plan.facts import SpecFacts
from attngen.plan.shared_memory import COLUMN, DROPOUT, NEITHER, WORK_TILE, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.schedules.parts import tile_of_block
from attngen.schedules.parts.mma import MMA_ROWS, chunk, operands, padded_head_dim
from attngen.schedules.parts.tile_of_block import width
from attngen.spec.attention import AttentionSpec

RANDOM_REGISTERS = 16  # for dropout: the words of a call of Philox, and what they become
CAPTURED_REGISTERS = 10  # addresses of captured tensors, and indices into them, where registers are estimated
TILE_WORDS = 2  # words of 32 tiles that a warp has classified: which are visited, which are full
WHY_IDLE = {True: ("not all", "the 16-byte chunks of a row do not divide the number of threads")}


def row_blocks(tile: Tile) -> int:
    """Blocks of 16 rows of which a warp computes scores; warps that share a tile have one each."""
    return max(tile.block_q // (MMA_ROWS * tile.warps), 1)


def buffers(facts: SpecFacts, tile: Tile) -> tuple[SharedBuffer, ...]:
    spec = facts.spec
    q, kv, stages, own = tile.block_q, tile.block_kv, tile.stages, staged_of(facts, tile)
    d, dv, v_read = padded_head_dim(spec), width(spec, tile), NEITHER if operands(spec).split else COLUMN
    tiles = "one tile" if stages == 1 else f"{stages} tiles"

    def rows(name: str, shape: tuple[int, ...], use: str, read: str = COLUMN, then: str = "") -> SharedBuffer:
        return SharedBuffer(name=name, element=spec.dtype.name, shape=shape, use=use, pad=chunk(spec), read=read, then=then)

    generator = SharedBuffer(name="DROPOUT", element="unsigned", shape=(len(DROPOUT),), use="the generator of the head")
    return (
        rows("Q", (q, max(d, dv)), "the block's query rows, in the end its output", then="O"),
        rows("K", (stages, kv, d), f"the keys of {tiles}"),
        rows("V", (stages, kv, dv), f"the values of {tiles}", v_read),
        SharedBuffer(name="WORK_TILE", element="int", shape=(len(WORK_TILE),), use="which rows and head the block computes"),
        *([generator] if spec.dropout is not None else []),
        *([classified_tiles(tile)] if facts.bounds.per_tile else []),
        *([own.buffer(kv)] if own.keys else []),
        *(tile_of_block.buffers(spec, tile) if tile_of_block.is_shared(spec) else []),
    )


def classified_tiles(tile: Tile) -> SharedBuffer:
    """What a block has found of tiles."""
    bits = "a bit for each tile to visit, and for each full one"
    return SharedBuffer(name="TILES", element="unsigned", shape=(TILE_WORDS, tile.warps), use=bits)


def staged_of(facts: SpecFacts, tile: Tile) -> Staged:
    """The elements that the mask alone reads per key and per row, for tiles of many keys: one stage gives a barrier between
    Q K^T and the mask, and there must be more threads than keys."""
    own = facts.staged
    fits = tile.stages == 1 and 64 <= tile.block_kv < 32 * tile.warps and not operands(facts.spec).split
    return own if fits and not any(e.in_score for e in own.elements) else NOTHING


def copiers(spec: AttentionSpec, tile: Tile) -> int:
    """Threads that copy a row of a tile: one for each of its chunks."""
    return max(padded_head_dim(spec), width(spec, tile)) // chunk(spec)


def shared_bytes(facts: SpecFacts, tile: Tile) -> int:
    return aligned(*buffers(facts, tile))


def blocks_of_an_sm(facts: SpecFacts, arch: Arch, tile: Tile) -> int:
    """The number of blocks that an SM has room for, whatever number of registers their threads have."""
    by_registers = arch.registers_per_sm // ((arch.max_registers_per_thread + 1) * 32 * tile.warps)
    return min(arch.shared_per_sm // (shared_bytes(facts, tile) + arch.shared_reserved), by_registers)
