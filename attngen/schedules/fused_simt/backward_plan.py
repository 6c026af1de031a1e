"""The plan of the fused backward without tensor cores: a kernel owns keys, another rows; both recompute P from lse."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch
from attngen.plan.captured_sums import term_sums
from attngen.plan.decisions import delta_decisions, saved_decisions, term_decisions, wanted_decision
from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Decision, Plan, Schedule
from attngen.plan.room import Estimated
from attngen.plan.saved import delta_of, row_values, row_workspaces, saved_results
from attngen.plan.shared_memory import COLUMN, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, kib, pick_tile, planned, tile_decision
from attngen.schedules.fused_simt.plan import PAD

# Terms of one partial sum of dO V^T and of delta: few, since dP - delta is a small difference in rows with few keys.
SLICE_V = 8
OTHER_REGISTERS = 80  # as of the forward, and the numbers of rows


@dataclass(frozen=True, slots=True)
class Square:
    """A tile of `block` rows x `block` keys, and the grid of a block's threads over it."""

    block: int
    row_threads: int
    column_threads: int

    @property
    def warps(self) -> int:
        return self.row_threads * self.column_threads // 32

    @property
    def tile(self) -> Tile:
        return Tile(self.block, self.block, 1, self.warps)


# All threads that share a row are in one warp, so that they exchange weights without a block-wide barrier.
SQUARES = (Square(64, 16, 16), Square(32, 16, 8), Square(16, 16, 8), Square(8, 8, 8))
OF_TILE = {square.tile: square for square in SQUARES}


@dataclass(frozen=True, slots=True)
class FusedSimtBackwardPlan(Own):
    row_threads: int  # a block's threads are a grid of row_threads x column_threads over a tile
    column_threads: int
    slice_qk: int  # terms of one partial sum of Q K^T; of dO V^T: slice_v
    slice_v: int
    slice_w: int  # rows of one partial sum, in sums over the rows of tiles
    vector_qk: int  # neighbouring dimensions that a thread accumulates at once: of dQ and dK; of dV: vector_v
    vector_v: int

    @property
    def products(self) -> int:
        """The number of matrix products per tile, over all kernels."""
        return 4 * ("dk_dv" in self.kernels) + 3 * ("dq" in self.kernels) + 2 * (self.delta == "sums over keys")


def kernels_of(facts: SpecFacts) -> tuple[str, ...]:
    wanted = set(facts.wanted)
    places = {terms.place for terms in term_sums(facts)}
    needed = {
        "delta": bool(delta_of(facts)),
        "dk_dv": bool(wanted & {"k", "v"}) or "keys" in places,
        "dq": "q" in wanted or bool(places - {"keys"}),
    }
    return tuple(n for n, is_needed in needed.items() if is_needed)


def buffers(facts: SpecFacts, square: Square) -> tuple[SharedBuffer, ...]:
    spec, values = facts.spec, row_values(facts)

    def rows(name: str, width: int, use: str) -> SharedBuffer:
        return SharedBuffer(name=name, element="fp32", shape=(square.block, width), use=use, pad=PAD, read=COLUMN)

    of_rows = SharedBuffer(
        name="ROWS", element="fp32", shape=(len(values), square.block), use=f"{', '.join(values)} of a tile's rows"
    )
    return (
        rows("Q", spec.head_dim, "query rows: a tile of them, or the block's own"),
        rows("K", spec.head_dim, "keys: the block's own, or a tile of them"),
        rows("V", spec.head_dim_v, "their values"),
        rows("DO", spec.head_dim_v, "the rows' gradients of O"),
        rows("W", square.block, "weights of the tile's pairs, each row used by the warp that wrote it"),
        *([of_rows] if values else []),
    )


def registers(facts: SpecFacts, square: Square) -> int:
    rows, columns = square.block // square.row_threads, square.block // square.column_threads
    dims = (facts.spec.head_dim + facts.spec.head_dim_v) // square.column_threads
    return 3 * rows * columns + rows * dims + 4 * (rows + columns) + OTHER_REGISTERS


def cost(facts: SpecFacts, square: Square) -> Cost:
    return Cost(aligned(*buffers(facts, square)), Estimated(registers(facts, square)))


def fits(facts: SpecFacts, arch: Arch, square: Square) -> bool:
    spec = facts.spec
    whole = spec.head_dim % square.column_threads == spec.head_dim_v % square.column_threads == 0
    return whole and cost(facts, square).fits(arch, 32 * square.warps)


def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    return tuple(s.tile for s in SQUARES if fits(facts, arch, s))


def blocks_of_an_sm(facts: SpecFacts, arch: Arch, square: Square) -> int:
    """The number of blocks that fit an SM, by shared memory and by the estimated registers of a thread."""
    by_registers = arch.registers_per_sm // (32 * square.warps * registers(facts, square))
    return max(1, min(arch.shared_per_sm // (cost(facts, square).shared + arch.shared_reserved), by_registers))


def slice_of(dims: int) -> int:
    return 16 if dims % 16 == 0 else 8


def vector_of(dims: int, square: Square) -> int:
    return next(n for n in (4, 2, 1) if dims // square.column_threads % n == 0)


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec, fit = facts.spec, tiles(facts, arch)
    square = OF_TILE[pick_tile(spec, arch, fit, fit, lambda t: cost(facts, OF_TILE[t]))]
    dims, dims_v = spec.head_dim, spec.head_dim_v
    own = FusedSimtBackwardPlan(
        square.row_threads,
        square.column_threads,
        slice_of(dims),
        SLICE_V,
        slice_of(square.block),
        vector_of(dims, square),
        vector_of(dims_v, square),
        kernels=kernels_of(facts),
        delta=delta_of(facts),
    )
    saved, terms, blocks = saved_results(facts), term_sums(facts, diagonals=True), blocks_of_an_sm(facts, arch, square)
    threads = 32 * square.warps
    decisions = (
        wanted_decision(facts),
        *saved_decisions(saved),
        *delta_decisions(own.delta),
        *term_decisions(terms),
        Decision(
            "kernels",
            " and ".join(own.kernels),
            "keys stay for dK and dV, rows for dQ: a block adds up alone what it owns, in a fixed order",
        ),
        tile_decision(
            spec,
            square.tile,
            f"the largest of these squares, which serve both kernels, that fits {kib(arch.shared_per_block)} of shared memory",
        ),
        Decision("THREADS", str(threads), f"{own.row_threads} x {own.column_threads} threads over the tile"),
        Decision("BLOCKS", str(blocks), "an SM has shared memory and registers for as many"),
        Decision("stages", "1", "other blocks on the same multiprocessor compute while this one loads"),
    )
    return planned(
        schedule,
        facts,
        arch,
        square.tile,
        decisions,
        buffers(facts, square),
        own,
        blocks=blocks,
        saved=saved,
        term_sums=terms,
        workspaces=tuple(row_workspaces(facts).values()),
    )
