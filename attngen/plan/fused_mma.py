"""The fused rung on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async, fp16 and bf16."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.arch import Arch, Feature
from attngen.plan.distances import divided_distances
from attngen.plan.one_score import one_score_decisions
from attngen.plan.plan import Decision, FragmentsAhead, Plan, lay_out
from attngen.plan.precision import precision_decisions
from attngen.plan.staging import NOTHING, Staged, staged
from attngen.plan.tiles import Q_HI, Q_LO, Q_TILE, K, Q, tile_bounds
from attngen.plan.tiling import Cost, Tile, fitting, pick_tile
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Expr, Gather, Type, name, names_in, rewrite, walk
from attngen.spec.operator import ZERO, sub

MMA_ROWS = 16  # the rows of one mma
CHUNK_BYTES = 16  # what a lane copies at once; a row in shared memory is padded by as much, see `propose`
NEEDED = (Feature.CP_ASYNC, Feature.LDMATRIX)


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
SPLIT_UP_TO = 225  # registers of a thread by the estimate: beyond, ptxas spills some
CAPTURED_REGISTERS = 10  # addresses of captured tensors
KEY_REGISTERS = 2  # the address of an element that a thread reads of one key
RESERVED = 1024  # bytes of shared memory that the driver adds to each block
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
# Masks that come with the tensors allow parts of many tiles: fewer rows waste less of them. 128 are for masks that
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


K_AHEAD = 80  # head size
SPLIT_AHEAD = 64  # head size
BETWEEN_UP_TO = 128  # head size: by measurement, wider ones are not faster with copies between products
HALF_UP_TO = 64  # head size
TILE_WORDS = 2  # of 32 tiles each, that a warp has classified: which are visited, which are full
WHAT_TILES = "a bit for each tile that is to be visited, and for each full one"
WHY_BETWEEN = "asked for when the first products of a tile are queued: the tensor cores have work while addresses are computed"
WHICH_AHEAD = {"Q": "Q's one ahead", "K": "K's one ahead", "Q and K": "Q's and the first of K's a step ahead"}
WHY_AHEAD = "read before the products of those at hand, which need not wait for shared memory then"
WHY_STAGGERED = "the lower half begins at later keys: a tile ahead of the upper half, neither meets the other's tiles"
WHY_HALF = "it may have keys for the lower half alone; each warp has 16 rows of either half, so each has half the products then"
WHY_KEYS = "of partial tiles: each key's elements are read once, under Q K^T, not by each thread that meets the key"


def suits(spec: AttentionSpec, arch: Arch) -> bool:
    """Whether `arch` has the instructions, and the smallest tile registers: it has not for split operands of wide heads beside
    elements of captured tensors."""
    return arch.has(*NEEDED, operands(spec).feature) and bool(fitting(arch, preferred_tiles(spec), lambda t: cost(spec, t)))


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


def holds_q(spec: AttentionSpec, tile: Tile, limit: int = 250) -> bool:
    """Whether Q's fragments stay in registers: whether they find room beside the output, the scores, and the elements that a
    thread reads of its keys."""
    reads_keys = any(names_in(*g.args) & {"q", "k"} == {"k"} for g in _gathers(spec)) and not staged_of(spec, tile).keys
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


def ends_move(spec: AttentionSpec) -> bool:
    """Whether where a row's keys end moves with the row, by the end's closed form."""
    read = names_in(tile_bounds(spec).kv_end)
    return bool(read & {Q_LO.name, Q_HI.name}) and Q_TILE.name not in read


def left_over(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether some threads copy nothing: the chunks of a row of 16-bit numbers do not divide their number."""
    widths = (padded_head_dim(spec), width_of_v(spec))
    return not operands(spec).split and any(32 * tile.warps % (width // chunk(spec)) for width in widths)


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


def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether each pair of a query and a key has an element of a captured tensor for itself. Read by their distance,
    elements repeat along the diagonals of a thread's pairs."""
    return any(names_in(*(rewrite(index, _distance) for index in node.args)) & {"q", "k"} for node in _pair_gathers(spec))


def _gathers(spec: AttentionSpec) -> list[Gather]:
    """Elements of captured tensors that the mask or the score reads."""
    return [node for e in (spec.mask, spec.score) if e is not None for node in walk(e) if isinstance(node, Gather)]


def _pair_gathers(spec: AttentionSpec) -> list[Gather]:
    """Those that change with both the query and the key."""
    return [node for node in _gathers(spec) if {"q", "k"} <= names_in(*node.args)]


def _distance(node: Expr) -> Expr | None:
    """A name in the place of `k - q` or `q - k`."""
    return name("q.k", Type.INT) if node in (sub(K, Q), sub(Q, K)) else None


def _captured_registers(spec: AttentionSpec, tile: Tile, scores: int) -> int:
    """For elements of captured tensors and their addresses. A thread that reads elements of one key holds these during Q K^T,
    and counts closer: weights without a softmax take one more, and so does LSE of scores that are not plain products."""
    own = staged_of(spec, tile)
    elements = _elements(spec, scores)
    if not own.keys:
        return (CAPTURED_REGISTERS if spec.inputs else 0) + elements
    others = {i.name for i in spec.inputs} - {e.gather.input for e in own.elements}
    held = sum(KEY_REGISTERS + e.stored.bytes // 4 for e in own.keys)
    more = (spec.normalize != "softmax") + (spec.lse and spec.score != S)
    return (CAPTURED_REGISTERS if others else 0) + held + more + elements


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
        gathers = spec.mask is not None and any(isinstance(node, Gather) for node in walk(spec.mask))
        for_data = [t for t in PREFERRED_FOR_DATA if t.block_q <= ROOMY_ROWS or staged_of(spec, t).rows]
        if ends_move(spec) and max(spec.head_dim, spec.head_dim_v) > HALF_UP_TO:
            for_data.sort(key=lambda t: -t.block_q)  # of 128 rows too the last tile is for 64
        return (*for_data, *PREFERRED) if gathers else PREFERRED
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
        f"{v} is copied during Q K^T, {k} during {'' if between else 'the softmax and '}P V"
        if stages == 1
        else f"{k} and V are copied while these are used"
    )
    if spec.schedule.stages:
        why_stages = "as the spec asks; " + why_stages
    blocks = blocks_of_an_sm(spec, arch, tile)
    why_tile = (
        "as the spec asks"
        if spec.schedule.block_q
        else f"the largest preferred tile that fits registers and shared memory; an SM has room for {blocks} such block"
        + ("s" if blocks != 1 else "")
    )
    rows = MMA_ROWS * row_blocks(tile)
    why_warps = f"{rows} rows each: no warp needs another's softmax" + (
        ", and a fragment of K or V serves two products" if rows > MMA_ROWS else ""
    )
    holds, ahead = holds_q(spec, tile), fragments_ahead(spec, tile)
    decisions = (
        Decision("schedule", "fused_mma", f"{t} on tensor cores (mma.sync, which {arch.name} has)"),
        *precision_decisions(spec),
        *one_score_decisions(spec),
        *([Decision("products", numbers.products, numbers.because)] if numbers.split else []),
        Decision("BLOCK_Q x BLOCK_KV", f"{q} x {kv}", why_tile),
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


def _why_q(spec: AttentionSpec, tile: Tile, holds: bool) -> str:
    if operands(spec).split:
        return f"split in two, its fragments would take {2 * q_registers(spec, tile)} registers a thread, which spills others"
    others = row_blocks(tile) * (spec.head_dim_v + tile.block_kv) // 2
    needed = f"its fragments take {q_registers(spec, tile)} registers a thread"
    return needed if holds else f"{needed}, and output and scores already take {others}"


def _tiles(stages: int) -> str:
    return "one tile" if stages == 1 else f"{stages} tiles"
