"""What a tile of the Hopper schedule needs: registers of a thread, shared memory of a block."""

from __future__ import annotations

from attngen.plan.arch import Arch
from attngen.plan.axes import ROWS
from attngen.plan.captured_staging import Element, pair_elements
from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.room import Estimated
from attngen.plan.shared_memory import WORK_TILE, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost
from attngen.schedules.hopper.tiles import consumers
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS, slab_tiles, slabs
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Gather, names_in, walk

OTHER_REGISTERS = 30  # an estimate: addresses, sizes, loop counters, exponents in flight
CAPTURED_REGISTERS = 8  # addresses and elements of captured tensors
PAIR_ELEMENT_REGISTERS = 18  # if each pair reads an element of its own: with fewer, each read waits for the previous one
PAIR_REGISTERS = 32  # for a score, or a mask that is evaluated for each pair: threads of four consumers have too few
# Registers of a producer's and of a consumer's thread, by the number of consumers: multiples of 8 within those of the launch.
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}
STAGING_REGISTERS = {2: (56, 224), 3: (56, 152), 4: (56, 104)}  # where the producer reads key vectors
CLASSIFYING_REGISTERS = {2: (72, 216), 3: (56, 152), 4: (56, 104)}  # and classifies tiles too, where so many suffice
KEPT_REGISTERS = 10  # for dropout: what a head's generator needs, and bytes of pairs
CALL_KEYS = 32  # keys whose pairs one call of Philox serves
DESCRIPTOR_REGISTERS = 4  # for the descriptor of Q in shared memory
MOST_CONSUMERS = 4
OUTPUT_ROWS = "output rows of each warp, on their way to global memory"
# by whether Q goes to registers at once
WHOSE = {True: "Q holds now, and held before", False: "are current, and were before"}


def buffers(
    facts: SpecFacts, tile: Tile, output_slabs: int = 1, ones: bool = False, pair_slots: int = 0
) -> tuple[SharedBuffer, ...]:
    spec = facts.spec
    t, q, kv, stages, groups = spec.dtype.name, tile.block_q, tile.block_kv, tile.stages, consumers(tile)
    d, dv, own = slabs(spec.head_dim), slabs(spec.head_dim_v), facts.staged
    holds, rotates = q_in_registers(facts, tile), own_tiles(facts, tile)
    rows, whose = ((d, q), "") if holds else ((groups, d, WARPGROUP_ROWS), " of each consumer")
    pairs, of_pairs = staged_pairs(facts) if pair_slots else (), (groups, pair_slots, slabs(kv), WARPGROUP_ROWS)
    of_q = 2 if holds else 2 + 2 * groups  # a full/empty pair; or one for the work tile, and one for each consumer's rows

    def words(name: str, shape: tuple[int, ...], use: str, element: str = "int") -> SharedBuffer:
        return SharedBuffer(name=name, element=element, shape=shape, use=use)

    return (
        slab_tiles("Q", t, rows, "the query rows" + whose),
        slab_tiles("K", t, (stages, d, kv), f"the keys of {stages} tiles"),
        slab_tiles("V", t, (stages, dv + ones, kv), f"the values of {stages} tiles" + ", and ones" * ones),
        slab_tiles("O", t, (4 * groups, output_slabs, 16), OUTPUT_ROWS, read=None),
        *(slab_tiles("PAIRS", t, of_pairs, f"{e.input} of each consumer's tiles", None) for e in pairs),
        words("BARRIERS", (of_q + 4 * stages + 2 * groups * pair_slots,), "see the kernel", "mbarrier"),
        words("WORK_TILES", (2, len(WORK_TILE) + rotates), "which rows and head " + WHOSE[holds]),
        *([visits(stages)] if facts.bounds.per_tile else []),  # the producer classifies tiles and publishes them
        *([own.buffer(kv, stages + 1)] if own.keys else []),  # for the stages of K, and the tile whose weights are computed
    )


def visits(stages: int) -> SharedBuffer:
    """What the producer, which classifies tiles, publishes of them."""
    use = "which tile comes after that of a stage, and which comes first"
    return SharedBuffer(name="VISITS", element="int", shape=(stages + 2,), use=use)


def own_tiles(facts: SpecFacts, tile: Tile) -> bool:
    """Whether a consumer may have fewer tiles than its block: the mask bounds a row's keys, of which tiles have few."""
    bounds = facts.bounds
    read = names_in(*(e for e in (bounds.begin, bounds.end, bounds.full_begin, bounds.full_end) if e is not None))
    by_row = not bounds.uniform and ROWS.tile.name not in read  # ranges of captured vectors are those of whole blocks
    # rows above a packed sequence's first are its neighbour's, or no one's: blocks are aligned to the first row
    return by_row and not bounds.per_tile and tile.block_kv < tile.block_q and not facts.spec.kernel.is_packed


def output_slabs(facts: SpecFacts, arch: Arch, tile: Tile, ones: bool) -> int:
    """Slabs of the output that are copied out at once: all of them, or the largest divisor of them that fits shared memory."""
    dv = slabs(facts.spec.head_dim_v)
    parts = [n for n in range(dv, 1, -1) if dv % n == 0]
    return next((n for n in parts if shared_bytes(facts, tile, n, ones) <= arch.shared_per_block), 1)


def staged_pairs(facts: SpecFacts) -> tuple[Element, ...]:
    """The element of each pair that consumers find in shared memory if there is room for it: of one tensor."""
    return pair_elements(facts.spec).pairs[:1]


def pair_slots(facts: SpecFacts, arch: Arch, tile: Tile, output_slabs: int, ones: bool) -> int:
    """The tiles of these elements that each consumer has in shared memory: as many as fit, at most two. None if Q is in shared
    memory: the warps that would copy the elements copy Q."""
    possible = (2, 1) if staged_pairs(facts) and q_in_registers(facts, tile) else ()
    return next((n for n in possible if shared_bytes(facts, tile, output_slabs, ones, n) <= arch.shared_per_block), 0)


def shared_bytes(facts: SpecFacts, tile: Tile, output_slabs: int = 1, ones: bool = False, pair_slots: int = 0) -> int:
    return aligned(*buffers(facts, tile, output_slabs, ones, pair_slots))


def registers(facts: SpecFacts, tile: Tile) -> int:
    """Registers that a consumer's thread needs: output, scores, weights of the previous tile, and the rest."""
    output, scores = facts.spec.head_dim_v // 2, tile.block_kv // 2
    asks_pairs = facts.spec.score != S or not facts.bounds.exact
    pairs = PAIR_REGISTERS if asks_pairs and consumers(tile) == MOST_CONSUMERS else 0
    dropped = KEPT_REGISTERS if facts.spec.dropout is not None else 0
    return output + scores + scores // 2 + OTHER_REGISTERS + captured_registers(facts) + pairs + dropped


@remembered
def captured_registers(facts: SpecFacts) -> int:
    """Registers for captured tensors: with key vectors, the elements of two rows and what is not staged."""
    spec = facts.spec
    own = facts.staged
    of_rows, read = 2 * (len(own.rows) + len(facts.row_terms)), _gathers(spec)
    if pair_gathers(spec):
        return of_rows + PAIR_ELEMENT_REGISTERS
    if not own.keys:
        each = {n for n in read if {"q", "k"} & names_in(*n.args)} or {n for n in walk(spec.score) if isinstance(n, Gather)}
        return of_rows + (CAPTURED_REGISTERS if each else 0)
    return of_rows + (CAPTURED_REGISTERS if read - {e.expr for e in own.elements} else 0)


def _gathers(spec: AttentionSpec) -> set[Gather]:
    read = (spec.score, spec.mask, spec.sink, spec.v_scale)
    return {n for e in read if e is not None for n in walk(e) if isinstance(n, Gather)}


def pair_gathers(spec: AttentionSpec) -> set[Gather]:
    """The elements of captured tensors that each pair reads for itself."""
    return {node for node in _gathers(spec) if _is_of_a_pair(node)}


def _is_of_a_pair(node: Gather) -> bool:
    """Whether one index is the row's and another the key's."""
    moving = [names_in(index) & {"q", "k"} for index in node.args]
    return {"q"} in moving and {"k"} in moving


def register_split(facts: SpecFacts, tile: Tile) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread."""
    groups = consumers(tile)
    if not facts.staged.keys:
        return REGISTERS[groups]
    split, without_q = STAGING_REGISTERS[groups], registers(facts, tile)
    with_q = without_q + q_registers(facts.spec)
    need = with_q if with_q <= split[1] else without_q + DESCRIPTOR_REGISTERS
    leaves = facts.bounds.per_tile and need <= CLASSIFYING_REGISTERS[groups][1]
    return CLASSIFYING_REGISTERS[groups] if leaves else split


def q_registers(spec: AttentionSpec) -> int:
    return -(-spec.head_dim // 16) * 4


def has_registers(facts: SpecFacts, tile: Tile, more: int = 0) -> bool:
    """Whether a consumer's thread has `more` registers beside what the tile needs."""
    return registers(facts, tile) + more <= register_split(facts, tile)[1]


def q_in_registers(facts: SpecFacts, tile: Tile) -> bool:
    return facts.spec.kernel.q != "shared" and may_hold_q(facts, tile)


def may_hold_q(facts: SpecFacts, tile: Tile) -> bool:
    return has_registers(facts, tile, remainder_registers(facts, tile) + q_registers(facts.spec))


def remainder_registers(facts: SpecFacts, tile: Tile) -> int:
    """Registers of a mask that divides: the dividend and the remainder of each distance."""
    return 2 * facts.divided_distances(2, tile.block_kv)


def cost(facts: SpecFacts, tile: Tile) -> Cost:
    """The cost of a tile, with the register limit of a consumer: above an even share, since the producer needs few."""
    return Cost(shared_bytes(facts, tile), Estimated(registers(facts, tile), register_split(facts, tile)[1]))
