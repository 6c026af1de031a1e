"""How the fused rung on tensor cores goes over its tiles: what is held, copied, read and multiplied when, by measurement.

The measurements are rows of docs/experiments.md.
"""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.fused_mma_needs import (
    KEY_REGISTERS,
    MMA_ROWS,
    blocks_of_an_sm,
    chunk,
    gathers,
    operands,
    padded_head_dim,
    q_registers,
    registers,
    remainders,
    row_blocks,
    staged_of,
    width_of_v,
)
from attngen.plan.plan import FragmentsAhead
from attngen.plan.tiles import Q_HI, Q_LO, Q_TILE, tile_bounds
from attngen.plan.tiling import Tile
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import names_in
from attngen.spec.operator import ZERO

K_AHEAD = 80  # head size
SPLIT_AHEAD = 64  # head size
BETWEEN_UP_TO = 128  # head size: by measurement, wider ones are not faster with copies between products
HALF_UP_TO = 64  # head size


def holds_q(spec: AttentionSpec, tile: Tile, limit: int = 250) -> bool:
    """Whether Q's fragments stay in registers: whether they find room beside the output, the scores, and the elements that a
    thread reads of its keys."""
    reads_keys = any(names_in(*g.args) & {"q", "k"} == {"k"} for g in gathers(spec)) and not staged_of(spec, tile).keys
    of_keys = KEY_REGISTERS * tile.block_kv // 4 if reads_keys else 0
    return not operands(spec).split and registers(spec, tile) + of_keys + q_registers(spec, tile) <= limit


def fragments_ahead(spec: AttentionSpec, tile: Tile) -> FragmentsAhead:
    """Whose next fragments are read before the products of these, by measurement: K's at head size 80; Q's where rows begin at
    different keys, whose bounds take registers that the compiler finds then; Q's and the first of K's of numbers split in tf32,
    where nothing else takes their registers."""
    if operands(spec).split == "tf32":
        plain = spec.score == S and spec.normalize == "softmax" and not remainders(spec, tile)
        return "Q and K" if plain and MMA_ROWS < spec.head_dim <= SPLIT_AHEAD and tile.block_kv > 16 else ""
    if not copies_between_steps(spec, tile):
        return ""
    if holds_q(spec, tile):
        return "K" if spec.head_dim == spec.head_dim_v == K_AHEAD else ""
    bounds = tile_bounds(spec)
    return "Q" if not bounds.per_tile and bounds.kv_begin is not ZERO else ""


def copies_between_steps(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether copies are asked for between the steps of products, not before them: where there are steps enough, where a warp
    has two row blocks, and where it is not slower."""
    steps, last = padded_head_dim(spec) // MMA_ROWS, tile.block_kv // MMA_ROWS
    narrow = max(spec.head_dim, spec.head_dim_v) <= BETWEEN_UP_TO
    return steps >= 3 and last >= 2 and row_blocks(tile) == 2 and narrow and not operands(spec).split


def staggered(spec: AttentionSpec, arch: Arch, tile: Tile) -> bool:
    """Whether the two halves of a block's rows are to have tiles of their own, the lower half's perhaps one later: where rows
    begin and end at different keys, and a tile has as many keys as a half has rows. A block has room for one tile more then,
    if an SM has it for as many blocks."""
    bounds = tile_bounds(spec)
    if bounds.per_tile or tile.block_q != 2 * tile.block_kv or tile.warps % 2 or not copies_between_steps(spec, tile):
        return False
    rows = {Q_LO.name, Q_HI.name}
    move = all(names_in(end) & rows and Q_TILE.name not in names_in(end) for end in (bounds.kv_begin, bounds.kv_end))
    return move and blocks_of_an_sm(spec, arch, tile, tile.stages + 1) >= blocks_of_an_sm(spec, arch, tile)


def half_tile(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether the last tile of a block may be multiplied for the lower half of its rows alone: where rows further down see
    later keys, and a tile has as many keys as a half has rows. A warp has 16 rows of each half then. By measurement: under
    masks whose tiles are classified one by one, if they read tensors, which may make rows short, or the head is narrow."""
    bounds, width = tile_bounds(spec), max(spec.head_dim, spec.head_dim_v)
    fits = tile.block_q == 2 * tile.block_kv and row_blocks(tile) == 2 and not operands(spec).split
    return fits and bounds.per_tile and ends_move(spec) and (bool(bounds.spans) or width <= HALF_UP_TO)


def addresses_anew(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether a thread computes where its first elements of K and V are at each copy: kept from tile to tile they are two
    registers each, which ptxas does not find beside the state of classified tiles. Elsewhere it does, by measurement."""
    return copies_between_steps(spec, tile) and tile.stages == 1 and tile_bounds(spec).per_tile


def places_anew(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether a thread also computes where the K of its head is at each copy, and rows and batch of a partial tile and of one
    that it classifies: kept, ptxas spills them, and reads them back for each tile. By measurement, under masks that read
    tensors; not where a last tile is for half of the rows, whose loop ptxas orders otherwise."""
    return addresses_anew(spec, tile) and bool(tile_bounds(spec).spans) and not half_tile(spec, tile)


def ends_move(spec: AttentionSpec) -> bool:
    """Whether where a row's keys end moves with the row, by the end's closed form."""
    read = names_in(tile_bounds(spec).kv_end)
    return bool(read & {Q_LO.name, Q_HI.name}) and Q_TILE.name not in read


def left_over(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether some threads copy nothing: the chunks of a row of 16-bit numbers do not divide their number."""
    widths = (padded_head_dim(spec), width_of_v(spec))
    return not operands(spec).split and any(32 * tile.warps % (width // chunk(spec)) for width in widths)
