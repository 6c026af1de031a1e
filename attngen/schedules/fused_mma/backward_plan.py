"""The backward of the fused schedule on tensor cores: a kernel that owns keys and one that owns rows.

No floats are added up in global memory, so that every run has the same bits. `backward_additions` has the other form.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.diagnostics import counted
from attngen.plan.arch import Arch
from attngen.plan.captured_staging import pair_elements
from attngen.plan.captured_sums import TermSum, term_sums
from attngen.plan.decisions import delta_decisions, saved_decisions, term_decisions
from attngen.plan.facts import SpecFacts
from attngen.plan.memo import remembered
from attngen.plan.plan import LARGEST_HEAD, Decision, Plan, Schedule, refusal
from attngen.plan.room import Estimated
from attngen.plan.saved import delta_of, row_values, row_workspaces, saved_results
from attngen.plan.shared_memory import COLUMN, SharedBuffer, aligned
from attngen.plan.tile import Tile
from attngen.plan.tile_search import Cost, fitting, pick_tile, planned, tile_decision
from attngen.plan.variants import gathers
from attngen.schedules.fused_mma import backward_additions
from attngen.schedules.fused_mma.backward_needs import (
    OF_KEYS,
    OTHER_REGISTERS,
    OTHER_SPLIT_REGISTERS,
    WARPS_OF_AN_SM,
    FusedMmaBackwardPlan,
    blocks_of_an_sm,
    classifies,
    first_decisions,
    kernels_of,
    last_decisions,
    own_plan,
    terms_of,
    values_of_rows,
    widths,
)
from attngen.schedules.fused_mma.needs import CAPTURED_REGISTERS, classified_tiles, row_blocks
from attngen.schedules.parts.mma import MMA_ROWS, chunk, lacks, operands
from attngen.schedules.parts.tile_of_block import is_shared

SPLIT_PAIR_REGISTERS = 4  # per column of S and dP and row block: they stay in fp32 while they are multiplied
PARTS = (32, 16)  # columns of S that may be multiplied at once
MOST_REGISTERS = 255  # per thread, of each architecture
BLOCKS = 2  # per SM, if shared memory allows it: one multiplies while the other waits
# Blocks of as many keys as rows, so that ranges of captured vectors serve both kernels.
POSSIBLE = tuple(
    Tile(size, size, stages, size // rows)
    for size in (128, 64, 32, 16)
    for rows in (32, 16)
    if size >= rows
    for stages in (2, 1)
)


WHY_TWO_KERNELS = (
    "a block has its gradients for itself and adds them up in registers, in a fixed order: no atomics, the same bits in every "
    "run; in return S and dP are computed twice"
)


WHY_NOT_WIDE = (
    f"of heads above {LARGEST_HEAD} elements it has the gradients of q, k and v of 16-bit numbers with a softmax, without "
    "dropout and not in a fixed order, if both head sizes are at most 1024 together"
)


def why_not(facts: SpecFacts, arch: Arch) -> str:
    lacking = lacks(facts.spec, arch)
    if not lacking and not tiles(facts, arch):
        if is_shared(facts.spec):
            return WHY_NOT_WIDE
        smallest = POSSIBLE[-1]
        return f"the smallest tile of fused_mma_backward {cost(facts, smallest, True).why_not(arch, 32 * smallest.warps)}"
    return lacking


def registers(facts: SpecFacts, tile: Tile, part: int, apart: bool) -> int:
    """The estimate of what a thread needs: sums, S and dP of a part, and the rest."""
    spec, blocks = facts.spec, row_blocks(tile)
    split = operands(spec).split
    other = OTHER_SPLIT_REGISTERS if split else OTHER_REGISTERS
    of_pairs = SPLIT_PAIR_REGISTERS if split else 1
    captured = CAPTURED_REGISTERS if gathers(spec) else 0
    qk, v = (width if name in facts.wanted else 0 for width, name in zip(widths(spec), ("k", "v"), strict=True))
    delta = 4 if delta_of(facts) == "sums over keys" else 0  # one sum for each row of a thread
    columns = {"dk_dv": qk + v, "dv": v, "dk": qk, "dq": widths(spec)[0] if "q" in facts.wanted else 0, "delta": delta}
    kernels = kernels_of(facts, apart)
    sums = (blocks * columns[k] // 2 + _sums_of_terms(terms_of(facts, k, kernels), blocks) for k in kernels)
    return max(sums, default=0) + of_pairs * blocks * part + captured + _ahead(facts) + other


def _ahead(facts: SpecFacts) -> int:
    """Registers of operands that the compiler loads ahead; without captured gradients there is room for them."""
    if not term_sums(facts):
        return 0
    wide = max(widths(facts.spec))
    return max(0, wide - 64) // 2 if operands(facts.spec).split else max(0, wide - 128) * 5 // 16


def _sums_of_terms(terms: tuple[TermSum, ...], blocks: int) -> int:
    """Registers of a thread for captured gradients: a sum for each of its rows. Diagonals take the place of S."""
    return 2 * blocks * sum(t.place in ("rows", "keys") for t in terms)


def part_of(facts: SpecFacts, tile: Tile, apart: bool) -> int:
    """The most columns that are multiplied at once; 0 if there is no room for any."""
    fit = (part for part in PARTS if part <= tile.block_q and registers(facts, tile, part, apart) <= MOST_REGISTERS)
    return next(fit, 0)


def buffers(facts: SpecFacts, tile: Tile) -> tuple[SharedBuffer, ...]:
    """The shared memory of a block: its own rows, and tiles of the other axis."""
    spec, size, stages = facts.spec, tile.block_q, tile.stages
    qk, v = widths(spec)

    def rows(name: str, shape: tuple[int, ...], use: str) -> SharedBuffer:
        return SharedBuffer(name=name, element=spec.dtype.name, shape=shape, use=use, pad=chunk(spec), read=COLUMN)

    apart = apart_by_registers(facts, tile)
    kernels = kernels_of(facts, apart)
    kept = any(k in OF_KEYS or terms_of(facts, k, kernels) for k in kernels)
    folded = diagonal_columns(tile, part_of(facts, tile, apart) or PARTS[-1])
    diagonals = SharedBuffer(name="DIAGONALS", element="float", shape=(tile.warps, 8, folded), use="terms of a warp's pairs")
    return (
        rows("FIXED_QK", (size, qk), "the block's keys, or its queries; in the end dK or dQ"),
        rows("FIXED_V", (size, v), "the block's values, in the end dV; or its rows of dO"),
        rows("STREAMED_QK", (stages, size, qk), "a tile of queries, or of keys"),
        rows("STREAMED_V", (stages, size, v), "a tile of rows of dO, or of values"),
        *([values_of_rows(facts, tile)] if row_values(facts) and kept else []),
        *([diagonals] if any(terms.diagonals for terms in term_sums(facts, diagonals=True)) else []),
        *([classified_tiles(tile)] if classifies(facts) else []),
    )


def diagonal_columns(tile: Tile, part: int) -> int:
    """The columns of the terms of a warp's pairs whose rows 8 apart are added (templates/parts/types/diagonals.cuh.j2)."""
    return MMA_ROWS * row_blocks(tile) - 8 + part


def cost(facts: SpecFacts, tile: Tile, apart: bool) -> Cost:
    copiers = max(widths(facts.spec)) // chunk(facts.spec)  # threads per row: one for each of its chunks
    return Cost(shared_bytes(facts, tile), Estimated(registers(facts, tile, PARTS[-1], apart)), threads=copiers)


def shared_bytes(facts: SpecFacts, tile: Tile) -> int:
    return aligned(*buffers(facts, tile))


def apart_by_registers(facts: SpecFacts, tile: Tile) -> bool:
    """Whether dK and dV are added up by kernels of their own, because a thread has no registers for the sums of both."""
    return part_of(facts, tile, apart=False) == 0


@remembered
def tiles(facts: SpecFacts, arch: Arch) -> tuple[Tile, ...]:
    if backward_additions.adds(facts, arch):
        return backward_additions.tiles(facts, arch)
    if is_shared(facts.spec):
        return ()
    fit = fitting(arch, POSSIBLE, lambda t: cost(facts, t, apart=True))
    return tuple(sorted(fit, key=lambda t: _order(facts, arch, t)))


def _order(facts: SpecFacts, arch: Arch, tile: Tile) -> tuple[bool, int, int, int, int]:
    """Less is better: dK and dV in one kernel, which computes S and P once for both; enough warps on an SM; in several blocks;
    32 rows a warp, for which fragments are read once; the next tile copied in the background."""
    blocks = blocks_of_an_sm(facts, arch, tile, shared_bytes)
    warps = min(tile.warps * blocks, WARPS_OF_AN_SM)
    return apart_by_registers(facts, tile), -warps, -min(blocks, BLOCKS), -row_blocks(tile), -tile.stages


def propose(schedule: Schedule, facts: SpecFacts, arch: Arch) -> Plan:
    spec = facts.spec
    fitting_tiles = tiles(facts, arch)
    if why_not(facts, arch):
        head = max(spec.head_dim, spec.head_dim_v)
        what = f"fused_mma_backward does not compute {spec.dtype} with head size {head} on {arch.name}"
        raise refusal("kernel", what, why_not(facts, arch), "compute gradients by auto")
    if backward_additions.adds(facts, arch):
        return backward_additions.propose(schedule, facts, arch, fitting_tiles)
    tile = pick_tile(spec, arch, fitting_tiles, fitting_tiles, lambda t: cost(facts, t, apart=True))
    apart = apart_by_registers(facts, tile)
    kernels = kernels_of(facts, apart)
    own = own_plan(facts, tile, kernels, part_of(facts, tile, apart), widths(spec), "own kernel" if "dq" in kernels else "")
    return planned(
        schedule,
        facts,
        arch,
        tile,
        tuple(_decisions(facts, arch, tile, own)),
        buffers(facts, tile),
        own,
        blocks=blocks_of_an_sm(facts, arch, tile, shared_bytes),
        saved=saved_results(facts),
        staged=pair_elements(spec),
        term_sums=term_sums(facts, diagonals=True),
        workspaces=tuple(row_workspaces(facts).values()),
    )


def _decisions(facts: SpecFacts, arch: Arch, tile: Tile, own: FusedMmaBackwardPlan) -> Iterator[Decision]:
    rows = MMA_ROWS * row_blocks(tile)
    yield from first_decisions(facts, arch)
    if {"q", "k"} <= {*facts.wanted} or {"q", "v"} <= {*facts.wanted}:
        yield Decision("dK, dV and dQ", "by two kernels", WHY_TWO_KERNELS)
    if "dv" in own.kernels and "dk" in own.kernels:
        both = own.qk_width + own.v_width
        yield Decision("dK and dV", "by two kernels", f"one would have {row_blocks(tile) * both // 2} sums a thread, and spill")
    yield from saved_decisions(saved_results(facts))
    yield from delta_decisions(own.delta)
    yield from term_decisions(term_sums(facts, diagonals=True))
    why_square = "as many rows as keys: ranges of captured vectors serve both kernels; "
    blocks = blocks_of_an_sm(facts, arch, tile, shared_bytes)
    yield tile_decision(facts.spec, tile, f"{why_square}an SM has room for {counted(blocks, 'such block')}")
    shared = ", and a fragment of a tile serves two products" if rows > MMA_ROWS else ", for which a thread has registers"
    yield Decision("warps", str(tile.warps), f"{rows} keys, or rows, each{shared}")
    yield from last_decisions(facts, arch, tile, own, shared_bytes)
