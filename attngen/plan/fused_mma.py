"""The fused rung on tensor cores, sm_80 and later: mma.sync, ldmatrix and cp.async, fp16 and bf16."""

from __future__ import annotations

from attngen.plan.arch import Arch, Feature
from attngen.plan.plan import Decision, Plan, lay_out
from attngen.plan.tiles import tile_bounds
from attngen.plan.tiling import Cost, Tile, pick_tile
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Gather, names_in, walk

MMA_ROWS = 16  # the rows of one mma
PAD = 8  # elements at the end of each row in shared memory: the 8 rows of an ldmatrix then lie in different banks
NEEDED = (Feature.CP_ASYNC, Feature.LDMATRIX)
MMA = {"fp16": Feature.MMA_FP16, "bf16": Feature.MMA_BF16}
OTHER_REGISTERS = 60  # addresses, row state, fragments of K or V
CAPTURED_REGISTERS = 10  # addresses of captured tensors
RESERVED = 1024  # bytes of shared memory that the driver adds to each block
BLOCKS = 2  # of an SM, where tiles of ROOMY_ROWS allow it: one computes softmax while the other multiplies
ROOMY_ROWS = 64
TWO_STAGES_UP_TO = 225  # registers of a thread


# Two row blocks a warp read each fragment of K and V once for 32 rows: shared memory is what 16 rows a warp wait for.
PREFERRED = tuple(
    Tile(q, kv, stages, warps)
    for q, kv, warps in ((128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 32, 4), (32, 32, 2), (16, 16, 1))
    for stages in (2, 1)
)
POSSIBLE = tuple(
    Tile(q, kv, stages, q // rows)
    for rows in (32, 16)
    for q in (256, 128, 64, 32, 16)
    if q >= rows
    for kv in (128, 64, 32, 16)
    for stages in (1, 2)
)


def suits(spec: AttentionSpec, arch: Arch) -> bool:
    return spec.dtype.name in MMA and arch.has(*NEEDED, MMA[spec.dtype.name])


def padded_head_dim(spec: AttentionSpec) -> int:
    """The head size rounded up to the 16 elements that one mma sums over; the rest is zeros in shared memory."""
    return -(-spec.head_dim // 16) * 16


def row_blocks(tile: Tile) -> int:
    """Blocks of 16 rows that a warp computes."""
    return tile.block_q // (MMA_ROWS * tile.warps)


def holds_q(spec: AttentionSpec, tile: Tile, limit: int = 250) -> bool:
    """Whether Q's fragments stay in registers: whether they find room beside the output and the scores."""
    return registers(spec, tile) + row_blocks(tile) * padded_head_dim(spec) // 4 <= limit


def registers(spec: AttentionSpec, tile: Tile) -> int:
    """What a thread needs without Q: output, scores, and the rest."""
    output, scores = row_blocks(tile) * spec.head_dim_v // 2, row_blocks(tile) * tile.block_kv // 2
    captured = (CAPTURED_REGISTERS if spec.inputs else 0) + (scores if reads_pairs(spec) else 0)  # an element for each score
    return output + scores + captured + OTHER_REGISTERS


def shared_bytes(spec: AttentionSpec, tile: Tile) -> dict[str, int]:
    d, dv = padded_head_dim(spec) + PAD, spec.head_dim_v + PAD
    return {
        "Q": 2 * tile.block_q * max(d, dv),
        "K": 2 * tile.stages * tile.block_kv * d,
        "V": 2 * tile.stages * tile.block_kv * dv,
    }


def reads_pairs(spec: AttentionSpec) -> bool:
    """Whether an element of a captured tensor is read for each pair of a query and a key."""
    gathers = [node for e in (spec.mask, spec.score) if e is not None for node in walk(e) if isinstance(node, Gather)]
    return any({"q", "k"} <= names_in(*node.args) for node in gathers)


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    return Cost(sum(shared_bytes(spec, tile).values()), registers(spec, tile))


def blocks_of_an_sm(spec: AttentionSpec, arch: Arch, tile: Tile) -> int:
    """How many blocks an SM has room for."""
    need = cost(spec, tile)
    return min(arch.shared_per_sm // (need.shared + RESERVED), arch.registers_per_sm // (need.registers * 32 * tile.warps))


def is_roomy(spec: AttentionSpec, arch: Arch, tile: Tile) -> bool:
    """Whether an SM has room for BLOCKS of them; with two stages, and leave a fifth of its shared memory and some registers."""
    need = cost(spec, tile)
    shared = BLOCKS * (need.shared + RESERVED)
    spare = 5 * shared <= 4 * arch.shared_per_sm and need.registers <= TWO_STAGES_UP_TO
    return blocks_of_an_sm(spec, arch, tile) >= BLOCKS and (tile.stages == 1 or spare)


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The preferred tile that fits; see the decisions for its reasons."""
    roomy = [t for t in PREFERRED if t.block_q >= ROOMY_ROWS and is_roomy(spec, arch, t)]
    tile = pick_tile(spec, arch, (*roomy, *PREFERRED), POSSIBLE, lambda t: cost(spec, t))
    sizes = shared_bytes(spec, tile)
    q, kv, stages = tile.block_q, tile.block_kv, tile.stages
    d, dv, t = padded_head_dim(spec), spec.head_dim_v, spec.dtype.name
    buffers = lay_out(
        ("Q", sizes["Q"], f"{t} [{q}][{max(d, dv)} + {PAD}], the block's query rows, in the end its output"),
        ("K", sizes["K"], f"{t} [{stages}][{kv}][{d} + {PAD}], the keys of {_tiles(stages)}"),
        ("V", sizes["V"], f"{t} [{stages}][{kv}][{dv} + {PAD}], the values of {_tiles(stages)}"),
    )
    why_stages = (
        "V is copied during Q K^T, the next K during the softmax and P V"
        if stages == 1
        else "the next K and V are copied while these are used"
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
    holds = holds_q(spec, tile)
    decisions = (
        Decision("schedule", "fused_mma", f"{spec.dtype.name} on tensor cores (mma.sync, which {arch.name} has)"),
        Decision("BLOCK_Q x BLOCK_KV", f"{q} x {kv}", why_tile),
        Decision("warps", str(tile.warps), why_warps),
        Decision("stages", str(stages), why_stages),
        Decision(
            "Q",
            "in registers" if holds else "in shared memory",
            f"its fragments take {row_blocks(tile) * d // 4} registers a thread"
            + ("" if holds else f", and output and scores already take {row_blocks(tile) * (dv + kv) // 2}"),
        ),
        Decision("rows in shared memory", f"padded by {PAD}", "the 8 rows that ldmatrix reads lie in different banks"),
    )
    return Plan("fused", "fused_mma", arch, q, kv, tile.warps, stages, tile_bounds(spec), decisions, buffers, holds)


def _tiles(stages: int) -> str:
    return "one tile" if stages == 1 else f"{stages} tiles"
