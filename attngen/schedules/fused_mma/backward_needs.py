"""What both forms of the backward on tensor cores share: their choices as a value, the kernels, the widths of tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from attngen.plan.arch import Arch
from attngen.plan.captured_sums import TermSum, term_sums
from attngen.plan.choices import choice, decided
from attngen.plan.decisions import wanted_decision
from attngen.plan.facts import SpecFacts
from attngen.plan.mask_bounds import mask_bounds
from attngen.plan.own import Own
from attngen.plan.plan import Decision, origin_of
from attngen.plan.saved import Dq, delta_of, row_values
from attngen.plan.shared_memory import SharedBuffer
from attngen.plan.tile import Tile
from attngen.schedules.fused_mma.needs import WHY_IDLE
from attngen.schedules.parts.mma import MMA_ROWS, WHY_PAD, Split, chunk, of_products, operands
from attngen.spec.attention import AttentionSpec

OF_KEYS = ("dk_dv", "dk", "dv")  # the kernels that own keys; the first has dS
OTHER_REGISTERS = 56  # an estimate of what a thread has beside sums, S and dP: addresses, fragments
OTHER_SPLIT_REGISTERS = 76  # the same where each number is two
WARPS_OF_AN_SM = 8  # two for each of its schedulers: as many as have all the registers of a thread
Room = Callable[[SpecFacts, Tile], int]  # bytes of shared memory of a block


@dataclass(frozen=True, slots=True)
class DqPart:
    """What a warp multiplies of dQ of a tile, if blocks of keys add to dQ in global memory."""

    rows: int
    columns: int  # per chunk
    chunks: int  # sent out one after another
    added: int  # fp32 numbers that one instruction adds


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMmaBackwardPlan(Own):
    """The choices of this schedule beside its tile, and the widths of its tiles in elements."""

    # columns of S and dP that are multiplied at once
    part: int = choice("PART", lambda own, facts: (str(own.part), WHY_PART))
    split: Split  # the type of the two parts of each number; empty: numbers are not split
    idle_copiers: bool = choice("copying threads", WHY_IDLE)  # some threads copy nothing
    chunk: int  # elements that a lane copies at once, 16 bytes; a row in shared memory is padded by as many
    qk_width: int  # elements per row of Q or K in shared memory, without the padding
    v_width: int
    dq: Dq
    shares: int = 1  # warps that have the same keys: each has its share of a tile's rows, for the pairs, and of the columns
    dq_part: DqPart | None = None  # additions only
    # additions only, `templates/parts/fused_mma_backward/adding_NAME.j2`: whose P and dS a warp multiplies from registers
    adding: Literal["own_rows", "all_rows"] = "own_rows"


def own_plan(
    facts: SpecFacts, tile: Tile, kernels: tuple[str, ...], part: int, widths: tuple[int, int], dq: Dq, **more: Any
) -> FusedMmaBackwardPlan:
    copied, threads = chunk(facts.spec), 32 * tile.warps
    qk_width, v_width = widths
    return FusedMmaBackwardPlan(
        kernels=kernels,
        delta=delta_of(facts),
        part=part,
        split=operands(facts.spec).split,
        idle_copiers=any(threads % (width // copied) for width in widths),
        chunk=copied,
        qk_width=qk_width,
        v_width=v_width,
        dq=dq,
        **more,
    )


def widths(spec: AttentionSpec) -> tuple[int, int]:
    """The head sizes rounded up to the 16 elements that a step sums over; the rest is zeros in shared memory."""
    return -(-spec.head_dim // MMA_ROWS) * MMA_ROWS, -(-spec.head_dim_v // MMA_ROWS) * MMA_ROWS


def kernels_of(facts: SpecFacts, apart: bool) -> tuple[str, ...]:
    """The kernels that the wanted gradients need, if none are added up in any order; `apart`: dK and dV by a kernel each."""
    wanted, places = {*facts.wanted}, {terms.place for terms in term_sums(facts)}
    both = {"k", "v"} <= wanted and not apart
    needed = {
        "delta": bool(delta_of(facts)),
        "dk_dv": both,
        "dv": "v" in wanted and not both,
        "dk": ("k" in wanted and not both) or ("keys" in places and "v" not in wanted),
        "dq": "q" in wanted or bool(places - {"keys"}),
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def terms_of(facts: SpecFacts, kernel: str, kernels: tuple[str, ...]) -> tuple[TermSum, ...]:
    """What `kernel` adds up of captured gradients; `kernels` are all of the program."""
    of_keys = next((name for name in OF_KEYS if name in kernels), "")
    owner = {"keys": of_keys, "rows": "dq", "pairs": "dq", "words": "dq"}
    return tuple(terms for terms in term_sums(facts, diagonals=True) if owner[terms.place] == kernel)


def classifies(facts: SpecFacts) -> bool:
    """Whether tiles are classified one by one, of keys or of rows."""
    return facts.bounds.per_tile or mask_bounds(facts.spec, None, "q").per_tile


def values_of_rows(facts: SpecFacts, tile: Tile) -> SharedBuffer:
    """The numbers of the rows of tiles of queries."""
    shape = (tile.stages, len(row_values(facts)), tile.block_q)
    return SharedBuffer(name="ROW_VALUES", element="float", shape=shape, use="numbers of a tile's rows, such as lse")


def first_decisions(facts: SpecFacts, arch: Arch) -> Iterator[Decision]:
    """What both forms say first."""
    yield Decision("schedule", "fused_mma_backward", f"{facts.spec.dtype} on tensor cores (mma.sync, which {arch.name} has)")
    yield wanted_decision(facts)
    if words := of_products(facts.spec):
        yield Decision("products", *words)


def last_decisions(facts: SpecFacts, arch: Arch, tile: Tile, own: FusedMmaBackwardPlan, room: Room) -> Iterator[Decision]:
    """What both forms say last; `room` is what a block of a tile takes."""
    why_stages = "the next tile is copied while one is multiplied"
    if facts.spec.kernel.stages:
        why_stages = ""
    elif tile.stages == 1 and room(facts, replace(tile, stages=2)) > arch.shared_per_block:
        why_stages = "two do not fit shared memory"
    elif tile.stages == 1:
        why_stages = "with two, fewer blocks fit a multiprocessor, and another block multiplies while this one waits"
    yield Decision("stages", str(tile.stages), why_stages, origin_of(facts.spec.kernel.stages))
    yield from decided(own, facts, "part")
    yield Decision("blocks per SM", str(blocks_of_an_sm(facts, arch, tile, room)), WHY_BLOCKS)
    yield from decided(own, facts, "idle_copiers")
    yield Decision("rows in shared memory", f"padded by {own.chunk}", WHY_PAD)


def blocks_of_an_sm(facts: SpecFacts, arch: Arch, tile: Tile, room: Room) -> int:
    """Blocks for which an SM has shared memory, up to the number that it has all registers of a thread for."""
    return min(arch.shared_per_sm // (room(facts, tile) + arch.shared_reserved), max(1, WARPS_OF_AN_SM // tile.warps))


WHY_PART = "columns of S and dP at once: their registers fit beside those of the gradients"
WHY_BLOCKS = "this limits the registers of a thread; without the limit, the compiler spills some to make room for more blocks"
