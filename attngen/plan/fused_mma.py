"""The fused rung on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async; fp16, bf16, and fp32 as split operands."""

from __future__ import annotations

from attngen.plan.arch import Arch, Feature
from attngen.plan.fused_mma_loop import (
    HALF_UP_TO,
    copies_between_steps,
    ends_move,
    fragments_ahead,
    half_tile,
    holds_q,
    staggered,
)
from attngen.plan.fused_mma_needs import (
    MMA_ROWS,
    RESERVED,
    TILE_WORDS,
    blocks_of_an_sm,
    chunk,
    cost,
    of_pairs,
    operands,
    padded_head_dim,
    q_registers,
    reads_pairs,
    row_blocks,
    shared_bytes,
    staged_of,
    width_of_v,
)
from attngen.plan.one_score import one_score_decisions
from attngen.plan.plan import Decision, Plan, lay_out
from attngen.plan.precision import precision_decisions
from attngen.plan.staging import Staged
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Tile, fitting, pick_tile
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Gather, walk

NEEDED = (Feature.CP_ASYNC, Feature.LDMATRIX)
SPLIT_UP_TO = 225  # registers of a thread by the estimate: beyond, ptxas spills some
BLOCKS = 2  # of an SM, where tiles of ROOMY_ROWS allow it: one computes softmax while the other multiplies
ROOMY_ROWS = 64
TWO_STAGES_UP_TO = 230  # registers of a thread
# Two row blocks a warp read each fragment of K and V once for 32 rows: shared memory is what 16 rows a warp wait for.
PREFERRED = tuple(
    Tile(q, kv, stages, warps)
    for q, kv, warps in ((128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 32, 4), (32, 32, 2), (16, 16, 1))
    for stages in (2, 1)
)
# Split operands need twice the registers: 16 rows a warp leave room for tiles of 64 keys.
PREFERRED_SPLIT = tuple(Tile(q, kv, 1, q // 16) for q, kv in ((64, 64), (64, 32), (64, 16), (32, 16), (16, 16)))
# 32 rows a warp where the operands' registers are few and no row has less to do than others.
PREFERRED_SPLIT_FULL = (Tile(128, 32, 1, 4),)
# Masks of queries' or keys' elements allow parts of many tiles: fewer rows waste less of them. 128 are for masks that
# compare a key's element with a row's, which shared memory hands on.
PREFERRED_FOR_DATA = (Tile(64, 64, 2, 2), Tile(128, 64, 1, 4), Tile(64, 64, 1, 2), Tile(64, 32, 2, 2))
# Masks and scores that read an element for each pair hold as many: 16 rows a warp.
PREFERRED_FOR_PAIRS = tuple(Tile(q, kv, 2, q // 16) for q, kv in ((64, 32), (32, 32)))
POSSIBLE = tuple(
    Tile(q, kv, stages, q // rows)
    for rows in (32, 16)
    for q in (256, 128, 64, 32, 16)
    if q >= rows
    for kv in (128, 64, 32, 16)
    for stages in (1, 2)
)
WEIGHING = {"softmax": "the softmax and ", "sigmoid": "the sigmoid and ", "none": ""}  # what comes before P V
WHAT_TILES = "a bit for each tile to visit, and for each full one"
WHY_BETWEEN = "issued when the first products of a tile are queued: the tensor cores work while addresses are computed"
WHICH_AHEAD = {"Q": "Q's one ahead", "K": "K's one ahead", "Q and K": "Q's and the first of K's a step ahead"}
WHY_AHEAD = "read before the current products, which then need not wait for shared memory"
WHY_STAGGERED = (
    "the lower half begins at later keys: a tile ahead of the upper half, it skips tiles that only the upper half needs"
)
WHY_HALF = "it may have keys for the lower half only; each warp has 16 rows of each half, and then does half the products"
WHY_KEYS = "for partial tiles: the elements of a key are read once, during Q K^T, not by every thread that meets the key"


def suits(spec: AttentionSpec, arch: Arch) -> bool:
    return not why_not(spec, arch)


def why_not(spec: AttentionSpec, arch: Arch) -> str:
    """Why this schedule cannot run the spec on `arch`; empty if it can. Even the smallest tile may need too many registers, if
    operands are split, heads wide, and elements of captured tensors read."""
    missing = [f for f in (*NEEDED, operands(spec).feature) if not arch.has(f)]
    if missing:
        return f"{arch.name} has no {', no '.join(f.value.partition(':')[0] for f in missing)}"
    preferred = preferred_tiles(spec)
    if fitting(arch, preferred, lambda t: cost(spec, t)):
        return ""
    smallest = preferred[-1]
    reason = cost(spec, smallest).why_not(arch, 32 * smallest.warps)
    return f"the smallest tile of fused_mma, {smallest.block_q} x {smallest.block_kv}, {reason}"


def blocks_told(spec: AttentionSpec, arch: Arch, tile: Tile) -> int:
    """The blocks of an SM that the compiler is told of, 0 for none: split operands fare best with all registers of a thread,
    which it does not give them unasked."""
    if not operands(spec).split:
        return 0
    every = arch.registers_per_sm // ((arch.max_registers_per_thread + 1) * 32 * tile.warps)
    return max(1, min(every, arch.shared_per_sm // (cost(spec, tile).shared + RESERVED)))


def is_roomy(spec: AttentionSpec, arch: Arch, tile: Tile) -> bool:
    """Whether an SM has room for BLOCKS of them; with two stages, and leave a fifth of its shared memory and some registers."""
    need = cost(spec, tile)
    if operands(spec).split:
        return need.registers <= SPLIT_UP_TO
    shared = BLOCKS * (need.shared + RESERVED)
    spare = 5 * shared <= 4 * arch.shared_per_sm and need.registers <= TWO_STAGES_UP_TO
    return blocks_of_an_sm(spec, arch, tile) >= BLOCKS and (tile.stages == 1 or spare)


def preferred_tiles(spec: AttentionSpec) -> tuple[Tile, ...]:
    """The tiles to be tried, the fastest first where they fit. Measured: `attngen tune`."""
    if not operands(spec).split:
        if reads_pairs(spec):
            return (*PREFERRED_FOR_PAIRS, *PREFERRED)
        from_data = spec.mask is not None and any(isinstance(node, Gather) and of_pairs(node) for node in walk(spec.mask))
        for_data = [t for t in PREFERRED_FOR_DATA if t.block_q <= ROOMY_ROWS or staged_of(spec, t).rows]
        if ends_move(spec) and max(spec.head_dim, spec.head_dim_v) > HALF_UP_TO:
            for_data.sort(key=lambda t: -t.block_q)  # of 128 rows too the last tile is for 64
        return (*for_data, *PREFERRED) if from_data else PREFERRED
    full = operands(spec).split == "bf16" and spec.mask is None
    return (*PREFERRED_SPLIT_FULL, *PREFERRED_SPLIT) if full else PREFERRED_SPLIT


def tiles(spec: AttentionSpec, arch: Arch) -> tuple[Tile, ...]:
    """The tiles that fit and give an SM four warps or more: one for each of its schedulers."""
    fit = fitting(arch, (*preferred_tiles(spec), *POSSIBLE), lambda t: cost(spec, t))
    return tuple(t for t in fit if t.warps * blocks_of_an_sm(spec, arch, t) >= 4)


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The preferred tile that fits; see the decisions for its reasons."""
    preferred = preferred_tiles(spec)
    roomy = [t for t in preferred if t.block_q >= ROOMY_ROWS and is_roomy(spec, arch, t)]
    tile = pick_tile(spec, arch, (*roomy, *preferred), POSSIBLE, lambda t: cost(spec, t))
    staggers, halves = staggered(spec, arch, tile), half_tile(spec, tile)
    q, kv, stages, slots = tile.block_q, tile.block_kv, tile.stages, tile.stages + staggers
    sizes = shared_bytes(spec, tile, slots)
    own = staged_of(spec, tile)
    numbers = operands(spec)
    d, dv, pad, t = padded_head_dim(spec), width_of_v(spec), chunk(spec), spec.dtype.name
    buffers = lay_out(
        ("Q", sizes["Q"], f"{t} [{q}][{max(d, dv)} + {pad}], the block's query rows, in the end its output"),
        ("K", sizes["K"], f"{t} [{slots}][{kv}][{d} + {pad}], the keys of {_tiles(slots)}"),
        ("V", sizes["V"], f"{t} [{slots}][{kv}][{dv} + {pad}], the values of {_tiles(slots)}"),
        ("PLACE", sizes["PLACE"], "int [3], which rows and head the block computes"),
        *([("TILES", sizes["TILES"], f"unsigned [{TILE_WORDS}][{tile.warps}], {WHAT_TILES}")] if sizes["TILES"] else []),
        *([("KEY_VECTORS", sizes["KEY_VECTORS"], _key_vectors(own, kv))] if own.keys else []),
    )
    between = copies_between_steps(spec, tile)
    v, k = ("the next V", "the K after next") if staggers else ("V", "the next K")
    why_stages = (
        f"{v} is copied during Q K^T, {k} during {'' if between else WEIGHING[spec.normalize]}P V"
        if stages == 1
        else f"{k} and V are copied while these are used"
    )
    if spec.schedule.stages:
        why_stages = "stated in the spec; " + why_stages
    rows = MMA_ROWS * row_blocks(tile)
    why_warps = f"{rows} rows each: no warp needs the scores of another" + (
        ", and a fragment of K or V serves two products" if rows > MMA_ROWS else ""
    )
    holds, ahead = holds_q(spec, tile), fragments_ahead(spec, tile)
    decisions = (
        Decision("schedule", "fused_mma", f"{t} on tensor cores (mma.sync, which {arch.name} has)"),
        *precision_decisions(spec),
        *one_score_decisions(spec),
        *([Decision("products", numbers.products, numbers.because)] if numbers.split else []),
        Decision("BLOCK_Q x BLOCK_KV", f"{q} x {kv}", _why_tile(spec, arch, tile, roomy)),
        Decision("warps", str(tile.warps), why_warps),
        Decision("stages", str(stages), why_stages),
        Decision(
            "Q",
            "in registers" if holds else "in shared memory",
            _why_q(spec, tile, holds),
        ),
        *([Decision("copies", "between products", WHY_BETWEEN)] if between else []),
        *([Decision("fragments", WHICH_AHEAD[ahead], WHY_AHEAD)] if ahead else []),
        *([Decision("halves of rows", "staggered", WHY_STAGGERED)] if staggers else []),
        *([Decision("last tile", "by halves of rows", WHY_HALF)] if halves else []),
        *([Decision("key vectors", "in shared memory", WHY_KEYS)] if own.keys else []),
        Decision("rows in shared memory", f"padded by {pad}", "the 8 rows that ldmatrix reads lie in different banks"),
    )
    return Plan(
        "fused",
        "fused_mma",
        arch,
        q,
        kv,
        tile.warps,
        stages,
        tile_bounds(spec),
        decisions,
        buffers,
        holds,
        between,
        ahead,
        staggers,
        halves,
        blocks_told(spec, arch, tile),
        staged=own,
    )


def _key_vectors(own: Staged, block_kv: int) -> str:
    dtypes = {e.stored.name for e in own.keys}
    shape = f"[{len(own.keys)}][{block_kv}]" if len(dtypes) == 1 else f"[{own.key_bytes * block_kv}]"
    return f"{dtypes.pop() if len(dtypes) == 1 else 'byte'} {shape}, what each key of a tile has for itself"


def _why_tile(spec: AttentionSpec, arch: Arch, tile: Tile, roomy: list[Tile]) -> str:
    blocks = blocks_of_an_sm(spec, arch, tile)
    if spec.schedule.block_q:
        return "stated in the spec"
    if tile in roomy and not operands(spec).split:
        return f"the fastest measured tile of which an SM has room for {blocks} blocks"
    room = f"an SM has room for {blocks} such block" + ("s" if blocks != 1 else "")
    return f"the fastest measured tile that fits registers and shared memory; {room}"


def _why_q(spec: AttentionSpec, tile: Tile, holds: bool) -> str:
    if operands(spec).split:
        return f"split in two, its fragments would take {2 * q_registers(spec, tile)} registers a thread, which spills others"
    others = row_blocks(tile) * (spec.head_dim_v + tile.block_kv) // 2
    needed = f"its fragments take {q_registers(spec, tile)} registers a thread"
    return needed if holds else f"{needed}, and output and scores already take {others}"


def _tiles(stages: int) -> str:
    return "one tile" if stages == 1 else f"{stages} tiles"
