"""What a tile of the fused rung on tensor cores needs: registers of a thread, shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.arch import Arch, Feature
from attngen.plan.distances import divided_distances
from attngen.plan.facts import fact
from attngen.plan.staging import NOTHING, Staged, staged
from attngen.plan.tiles import K, Q, tile_bounds
from attngen.plan.tiling import Cost, Tile
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Expr, Gather, Type, name, names_in, rewrite, walk
from attngen.spec.operator import sub

MMA_ROWS = 16  # the rows of one mma
CHUNK_BYTES = 16  # what a lane copies at once; a row in shared memory is padded by as much


@dataclass(frozen=True, slots=True)
class Operands:
    """How numbers of a storage type enter the tensor cores."""

    feature: Feature
    split: str = ""  # "tf32" or "bf16": each number is the sum of two of these, and three products are summed for one
    products: str = ""  # what that is called, and why it is done
    because: str = ""


OPERANDS = {
    "fp16": Operands(Feature.MMA_FP16),
    "bf16": Operands(Feature.MMA_BF16),
    "fp32": Operands(
        Feature.MMA_TF32,
        "tf32",
        "3xTF32",
        "a number as the sum of two that tf32 holds, three products for one: as exact as fp32, and faster than the ordinary "
        "arithmetic units",
    ),
    "fp32, precision high": Operands(
        Feature.MMA_BF16,
        "bf16",
        "bf16x3",
        "a number as the sum of two of bf16, three products for one, as `precision high` allows: errors of O up to 1e-4, and "
        "up to 1e-3 of its largest element",
    ),
}
OTHER_REGISTERS = 60  # addresses, row state, fragments of K or V
OTHER_SPLIT_REGISTERS = 95  # the same without V, where each fragment is two
CAPTURED_REGISTERS = 10  # addresses of captured tensors, and indices into them
OF_BLOCK_REGISTERS = 1  # an element that all pairs of a block share
SHARED_REGISTERS = 4  # more of them, beside a softmax, where scores or a sink read such an element
KEY_REGISTERS = 2  # the address of an element that a thread reads of one key
RESERVED = 1024  # bytes of shared memory that the driver adds to each block
TILE_WORDS = 2  # of 32 tiles each, that a warp has classified: which are visited, which are full


def operands(spec: AttentionSpec) -> Operands:
    return OPERANDS["fp32, precision high" if (spec.dtype.name, spec.precision) == ("fp32", "high") else spec.dtype.name]


def chunk(spec: AttentionSpec) -> int:
    """Elements that a lane copies at once."""
    return CHUNK_BYTES // spec.dtype.bytes


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size rounded up to the 16 elements that a step sums over; the rest is zeros in shared memory."""
    return -(-spec.head_dim // 16) * 16


def width_of_v(spec: AttentionSpec) -> int:
    """The head size of V as shared memory holds it: split operands are multiplied 16 columns at a time."""
    return -(-spec.head_dim_v // 16) * 16 if operands(spec).split else spec.head_dim_v


def row_blocks(tile: Tile) -> int:
    """Blocks of 16 rows that a warp computes."""
    return tile.block_q // (MMA_ROWS * tile.warps)


def q_registers(spec: AttentionSpec, tile: Tile) -> int:
    """Of a thread, for Q's fragments."""
    return row_blocks(tile) * padded_head_dim(spec) * spec.dtype.bytes // 8


def registers(spec: AttentionSpec, tile: Tile) -> int:
    """What a thread needs without Q: output, scores, and the rest."""
    output, scores = row_blocks(tile) * spec.head_dim_v // 2, row_blocks(tile) * tile.block_kv // 2
    if operands(spec).split:
        output, scores = row_blocks(tile) * width_of_v(spec) // 2, scores * (2 if operands(spec).split == "tf32" else 1)
    captured = _captured_registers(spec, tile, scores)
    if not operands(spec).split:
        return output + scores + captured + remainders(spec, tile) + OTHER_REGISTERS
    wide = max(0, tile.block_kv - 32) // 4 if operands(spec).split == "bf16" else 0  # fragments of K
    return output + scores + captured + wide + 16 * summed(tile) + OTHER_SPLIT_REGISTERS


def remainders(spec: AttentionSpec, tile: Tile) -> int:
    """Of a thread's distances, divided by params."""
    return divided_distances(spec, 2 * row_blocks(tile), tile.block_kv)


def summed(tile: Tile) -> int:
    """Split operands: sixteens of keys whose terms are added to the output at once, their fragments of V held together."""
    return min(2, tile.block_kv // 16)


def shared_bytes(spec: AttentionSpec, tile: Tile, slots: int = 0) -> dict[str, int]:
    """Of each buffer; with room for `slots` tiles of K and V, one for each stage where it is 0."""
    slots = slots or tile.stages
    size, pad = spec.dtype.bytes, chunk(spec)
    d, dv = padded_head_dim(spec) + pad, width_of_v(spec) + pad
    return {
        "Q": size * tile.block_q * max(d, dv),
        "K": size * slots * tile.block_kv * d,
        "V": size * slots * tile.block_kv * dv,
        "PLACE": 12,
        "TILES": TILE_WORDS * 4 * tile.warps if tile_bounds(spec).per_tile else 0,
        "KEY_VECTORS": staged_of(spec, tile).key_bytes * tile.block_kv,
    }


def staged_of(spec: AttentionSpec, tile: Tile) -> Staged:
    """What the mask alone reads of each key and of each row, for tiles of many keys: where one stage leaves a barrier between
    Q K^T and the mask, and there are more threads than keys."""
    own = staged(spec)
    fits = tile.stages == 1 and 64 <= tile.block_kv < 32 * tile.warps and not operands(spec).split
    return own if fits and not any(e.in_score for e in own.elements) else NOTHING


@fact
def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether each pair of a query and a key has an element of a captured tensor for itself. Read by their distance,
    elements repeat along the diagonals of a thread's pairs."""
    return any(names_in(*(rewrite(index, _distance) for index in node.args)) & {"q", "k"} for node in _pair_gathers(spec))


@fact
def gathers(spec: AttentionSpec) -> tuple[Gather, ...]:
    """Elements of captured tensors that the mask or the score reads."""
    return tuple(node for node in _walked(spec.mask, spec.score) if isinstance(node, Gather))


def _walked(*exprs: Expr | None) -> Iterator[Expr]:
    """All nodes of those that there are."""
    return walk(*(e for e in exprs if e is not None))


@fact
def _pair_gathers(spec: AttentionSpec) -> tuple[Gather, ...]:
    """Those that change with both the query and the key."""
    return tuple(node for node in gathers(spec) if {"q", "k"} <= names_in(*node.args))


def of_pairs(node: Gather) -> bool:
    """Whether the element is one of a query or of a key, not one that a block of rows has for all its pairs."""
    return bool({"q", "k"} & names_in(*node.args))


def _distance(node: Expr) -> Expr | None:
    """A name in the place of `k - q` or `q - k`."""
    return name("q.k", Type.INT) if node in (sub(K, Q), sub(Q, K)) else None


def _captured_registers(spec: AttentionSpec, tile: Tile, scores: int) -> int:
    """For elements of captured tensors and their addresses. A thread that reads elements of one key holds these during Q K^T,
    and counts closer: weights without a softmax take one more, and so does LSE of scores that are not plain products; what a
    block's pairs share takes none, as addresses are computed anew."""
    own = staged_of(spec, tile)
    elements = _elements(spec, scores)
    if operands(spec).split:
        return (CAPTURED_REGISTERS if spec.inputs else 0) + elements
    inputs = {g.input for g in gathers(spec) if of_pairs(g)}
    if not own.keys:
        return (CAPTURED_REGISTERS if inputs else _shared_registers(spec)) + elements
    others = inputs - {e.gather.input for e in own.elements}
    held = sum(KEY_REGISTERS + e.stored.bytes // 4 for e in own.keys)
    more = (spec.normalize != "softmax") + (spec.lse and spec.score != S)
    return (CAPTURED_REGISTERS if others else 0) + held + more + elements


@fact
def _shared_registers(spec: AttentionSpec) -> int:
    """For elements that all pairs of a block share."""
    shared = {g for g in gathers(spec) if not of_pairs(g)}
    weighed = spec.normalize == "softmax" and any(isinstance(n, Gather) for n in _walked(spec.score, spec.sink))
    return OF_BLOCK_REGISTERS * len(shared) + (SHARED_REGISTERS if weighed else 0)


def _elements(spec: AttentionSpec, scores: int) -> int:
    """Registers of a thread for elements of pairs: one for each score, or of wide tiles for some diagonals."""
    if reads_pairs(spec):
        return scores
    return max(0, scores - 32) // 3 if _pair_gathers(spec) else 0


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    return Cost(sum(shared_bytes(spec, tile).values()), registers(spec, tile))


def blocks_of_an_sm(spec: AttentionSpec, arch: Arch, tile: Tile, slots: int = 0) -> int:
    """How many blocks an SM has room for; see `shared_bytes`."""
    shared, threads = sum(shared_bytes(spec, tile, slots).values()), 32 * tile.warps
    return min(arch.shared_per_sm // (shared + RESERVED), arch.registers_per_sm // (registers(spec, tile) * threads))
