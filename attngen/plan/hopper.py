"""The rung for Hopper: warpgroups with roles, one that copies tiles by TMA and two to four that multiply them by wgmma."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from attngen.plan.arch import Arch, Feature
from attngen.plan.bounded import bounded_decisions, shift
from attngen.plan.code_size import INLINED_UP_TO, pair_operations
from attngen.plan.distances import divided_distances
from attngen.plan.facts import fact
from attngen.plan.hopper_tiles import PACES, POSSIBLE, PREFERRED, WARPGROUP_ROWS, Kind, Pace, Visited, consumers
from attngen.plan.hopper_tiles import tile as hopper_tile
from attngen.plan.one_score import one_score_decisions
from attngen.plan.plan import ALIGN, Decision, Plan, Roles, RowSums, lay_out, refusal
from attngen.plan.precision import precision_decisions
from attngen.plan.problem import Problem
from attngen.plan.row_keys import keys_of_rows
from attngen.plan.staging import Staged, staged
from attngen.plan.tiles import Q_TILE, TileBounds, tile_bounds
from attngen.plan.tiling import Cost, Tile, fitting, pick_tile
from attngen.spec.attention import AttentionSpec, Rung, S, Schedule
from attngen.spec.expr import Gather, names_in, walk
from attngen.spec.operator import ZERO
from attngen.spec.print_attn import expression_to_text

T = TypeVar("T")

NEEDED = (Feature.MBARRIER, Feature.TMA, Feature.WGMMA)
DTYPES = ("fp16", "bf16")
SLAB = 64  # 16-bit columns of 128 bytes: what the swizzle permutes
SWIZZLE_ATOM = 1024  # bytes: eight rows of a slab, to which tiles are aligned; their sizes are multiples of it
LAYOUT = "Q, K and V in slabs of 64 columns, 128 bytes a row, their chunks of 16 bytes permuted"
OTHER_REGISTERS = 30  # of a consumer: addresses, row state, the exponents on their way
CAPTURED_REGISTERS = 8  # addresses and elements of captured tensors
PAIR_ELEMENT_REGISTERS = (
    18  # the same where each pair has an element of its own: with fewer, each read waits for the one before
)
PAIR_REGISTERS = 32  # of a score, or a mask that is asked of each pair: more than four consumers' threads have to spare
# Registers of a producer's and of a consumer's thread, by the number of consumers: multiples of 8 within those of the launch.
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}
STAGING_REGISTERS = {2: (56, 224), 3: (56, 152), 4: (56, 104)}  # where the producer reads key vectors
CLASSIFYING_REGISTERS = {2: (72, 216), 3: (56, 152), 4: (56, 104)}  # and classifies tiles too, where so many suffice
DESCRIPTOR_REGISTERS = 4  # of Q in shared memory
ONES = 8  # columns beside V: the step of a wgmma's N
HEAVY_OF_ROOT = 0.75  # a row's limit in long rows: of the root of the number of keys, to which their rounding errors add up
SUM_REGISTERS = 2  # what threads add up in
MAX_COLUMNS = 256  # N of a wgmma
MOST_CONSUMERS = 4
WHOSE = {True: "Q holds, and held before", False: "are at hand, and were before"}  # by whether Q goes to registers at once
TENSOR_BOUND = 512  # head sizes of Q K^T and P V together from which products hide a few more instructions of a softmax


def slabs(head_dim: int) -> int:
    """Slabs of SLAB columns that hold a head; zeros fill the last one."""
    return -(-head_dim // SLAB)


def shared_bytes(spec: AttentionSpec, tile: Tile, output_slabs: int = 1, ones: bool = False) -> dict[str, int]:
    d, dv = 2 * SLAB * slabs(spec.head_dim), 2 * SLAB * slabs(spec.head_dim_v)
    return {
        "Q": tile.block_q * d,
        "K": tile.stages * tile.block_kv * d,
        "V": tile.stages * tile.block_kv * (dv + (2 * SLAB if ones else 0)),
        "O": tile.block_q * 2 * SLAB * output_slabs,
        "BARRIERS": 8 * (q_barriers(spec, tile) + 4 * tile.stages),
        "VISITS": 4 * (tile.stages + 2),
        "PLACES": 2 * 4 * place_words(spec, tile),
        "KEY_VECTORS": key_vector_slots(tile) * tile.block_kv * staged(spec).key_bytes,
    }


def adapts_slack(spec: AttentionSpec) -> bool:
    """Whether a row's slack is found from its first tile, so that its heaviest weights are exact: where all have the same keys.

    Elsewhere rows of few keys have the largest errors, which no slack changes.
    """
    return spec.normalize == "softmax" and spec.mask is None and shift(spec) is None


def heavy(row_sums: RowSums) -> int:
    """How many usual keys weigh as much as one whose score becomes the row's maximum, where slacks adapt.

    The fewer, the smaller the errors, and the more often O is rescaled; measured by `benchmarks/hopper.py --only plain,errors`.
    Sums of rounded weights bear more. So do long rows, whose other errors add up to the root of the number of keys.
    """
    return 64 if row_sums == "products" else 32


def tensor_bound(spec: AttentionSpec) -> bool:
    return spec.head_dim + spec.head_dim_v >= TENSOR_BOUND


def products_cost_most(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether three consumers hide so much of each other's softmax that an addition costs less than a product's share."""
    return consumers(tile) == 3 and 2 * (spec.head_dim + spec.head_dim_v) >= TENSOR_BOUND


def row_sums(spec: AttentionSpec, arch: Arch, tile: Tile) -> RowSums:
    """Of what a row's sum is.

    Counting the heaviest weights as P has them keeps their rounding out of O; but lse is of the weights themselves.
    """
    if spec.normalize != "softmax" or spec.lse:
        return "weights"
    columns = spec.head_dim_v % SLAB == 0 and spec.head_dim_v + ONES <= MAX_COLUMNS
    held = registers(spec, tile) + (q_registers(spec) if q_in_registers(spec, tile) else 0)
    fits = held + ONES // 2 - SUM_REGISTERS <= register_split(spec, tile)[1]
    exact = adapts_slack(spec) and products_cost_most(spec, tile)  # heavy weights are exact: sums need not be of rounded ones
    if columns and fits and not exact and _needs(spec, tile, ones=True) <= arch.shared_per_block:
        return "products"
    keeps_slack = not adapts_slack(spec) and shift(spec) is None
    return "weights, the heaviest rounded" if tensor_bound(spec) and keeps_slack else "weights"


def key_vector_slots(tile: Tile) -> int:
    """Tiles whose key vectors are kept: those in the stages of K, and the one that is being weighed."""
    return tile.stages + 1


def own_tiles(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether a consumer may have fewer tiles than its block: the mask bounds a row's keys, and a tile's are fewer than a
    block's rows."""
    bounds = tile_bounds(spec)
    read = names_in(*(e for e in (bounds.kv_begin, bounds.kv_end, bounds.full_begin, bounds.full_end) if e is not None))
    by_row = not bounds.even and Q_TILE.name not in read  # ranges of captured vectors are those of whole blocks
    return by_row and not bounds.per_tile and tile.block_kv < tile.block_q


def place_words(spec: AttentionSpec, tile: Tile) -> int:
    """What tells a piece of work: its rows and head, and whose turn it is where consumers take turns."""
    return 3 + own_tiles(spec, tile)


def output_slabs(spec: AttentionSpec, arch: Arch, tile: Tile, ones: bool) -> int:
    """Slabs of the output that are on their way at once: all of them, or the largest part of them that there is room for."""
    dv = slabs(spec.head_dim_v)
    parts = [n for n in range(dv, 1, -1) if dv % n == 0]
    return next((n for n in parts if _needs(spec, tile, n, ones) <= arch.shared_per_block), 1)


def _needs(spec: AttentionSpec, tile: Tile, output_slabs: int = 1, ones: bool = False) -> int:
    return sum(-(-n // ALIGN) * ALIGN for n in shared_bytes(spec, tile, output_slabs, ones).values())


def registers(spec: AttentionSpec, tile: Tile) -> int:
    """What a consumer's thread needs: output, scores, weights of the tile before, and the rest."""
    output, scores = spec.head_dim_v // 2, tile.block_kv // 2
    asks_pairs = spec.score != S or not tile_bounds(spec).by_row
    pairs = PAIR_REGISTERS if asks_pairs and consumers(tile) == MOST_CONSUMERS else 0
    return output + scores + scores // 2 + OTHER_REGISTERS + captured_registers(spec) + pairs


@fact
def captured_registers(spec: AttentionSpec) -> int:
    """What captured tensors take of them: with key vectors, the elements of two rows, and what is not staged."""
    own = staged(spec)
    read = {n for e in (spec.score, spec.mask, spec.sink) if e is not None for n in walk(e) if isinstance(n, Gather)}
    if any(_is_of_a_pair(node) for node in read):
        return 2 * len(own.rows) + PAIR_ELEMENT_REGISTERS
    if not own.keys:
        each = {n for n in read if {"q", "k"} & names_in(*n.args)} or {n for n in walk(spec.score) if isinstance(n, Gather)}
        return CAPTURED_REGISTERS if each else 0
    return 2 * len(own.rows) + (CAPTURED_REGISTERS if read - {e.gather for e in own.elements} else 0)


def _is_of_a_pair(node: Gather) -> bool:
    """Whether one index is of the row and another of the key."""
    moving = [names_in(index) & {"q", "k"} for index in node.args]
    return {"q"} in moving and {"k"} in moving


def register_split(spec: AttentionSpec, tile: Tile) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread."""
    groups = consumers(tile)
    if not staged(spec).keys:
        return REGISTERS[groups]
    split, without_q = STAGING_REGISTERS[groups], registers(spec, tile)
    with_q = without_q + q_registers(spec)
    need = with_q if with_q <= split[1] else without_q + DESCRIPTOR_REGISTERS
    leaves = tile_bounds(spec).per_tile and need <= CLASSIFYING_REGISTERS[groups][1]
    return CLASSIFYING_REGISTERS[groups] if leaves else split


def q_registers(spec: AttentionSpec) -> int:
    """What the fragments of Q take."""
    return -(-spec.head_dim // 16) * 4


def q_in_registers(spec: AttentionSpec, tile: Tile) -> bool:
    return registers(spec, tile) + remainder_registers(spec, tile) + q_registers(spec) <= register_split(spec, tile)[1]


def remainder_registers(spec: AttentionSpec, tile: Tile) -> int:
    """What a mask that divides holds beside them: the dividend and the remainder of each distance."""
    return 2 * divided_distances(spec, 2, tile.block_kv)


def q_barriers(spec: AttentionSpec, tile: Tile) -> int:
    """Full and empty: of Q, with whose rows it holds; or of those, and of each consumer's rows of Q."""
    return 2 if q_in_registers(spec, tile) else 2 + 2 * consumers(tile)


def cost(spec: AttentionSpec, tile: Tile) -> Cost:
    """Of a consumer's thread: the producer's few registers leave it more than an even share."""
    return Cost(_needs(spec, tile), registers(spec, tile), register_split(spec, tile)[1])


def suits(spec: AttentionSpec, arch: Arch) -> bool:
    return arch.has(*NEEDED) and spec.dtype.name in DTYPES and pair_operations(spec) <= INLINED_UP_TO


def refuse(spec: AttentionSpec, arch: Arch, rung: Rung = "hopper") -> None:
    """Raise PlanRefusal where a rung of these instructions cannot be had."""
    if not arch.has(*NEEDED):
        raise refusal("kernel", f"kernel {rung} on {arch.name}", "it needs TMA and wgmma", "use kernel fused, or --arch sm_90a")
    if spec.dtype.name not in DTYPES:
        raise refusal("kernel", f"kernel {rung} of {spec.dtype}", "its products are of fp16 or bf16", "use kernel fused")
    size = pair_operations(spec)
    if size > INLINED_UP_TO:
        limit = f"it computes at most {INLINED_UP_TO} for each pair: code between its products is inlined"
        raise refusal("kernel", f"kernel {rung} of a mask or score of {size} operations", limit, "use kernel fused")


@fact
def kind(spec: AttentionSpec) -> Kind:
    bounds = tile_bounds(spec)
    if spec.normalize != "softmax":
        return "other"
    if spec.score != S:
        return "other" if bounds.per_tile or shift(spec) is not None else "scored"
    if not bounds.per_tile and bounds.kv_begin is ZERO:
        return "plain"
    return "window" if bounds.by_row else "other"


def of_head_size(spec: AttentionSpec, table: Mapping[int, tuple[T, ...]]) -> tuple[T, ...]:
    size = max(spec.head_dim, spec.head_dim_v)
    return next((row for limit, row in table.items() if size <= limit), ())


def preferred_tiles(spec: AttentionSpec) -> tuple[Tile, ...]:
    """Of masks that divide by params first those of 128 and 64 keys that have registers for it: the blocks of a strided mask
    have such sides, and an edge in each tile of 96 keys."""
    slower = [p.tile for p in of_head_size(spec, PACES) if kind(spec) not in p.serves]
    usual = tuple(t for t in of_head_size(spec, PREFERRED) if t not in slower)
    if not divided_distances(spec, 2, SLAB):
        return usual
    whole = (*(t for t in usual if consumers(t) == 2 and t.block_kv % SLAB == 0), hopper_tile(2, SLAB, 2))
    roomy = (t for t in whole if registers(spec, t) + remainder_registers(spec, t) <= register_split(spec, t)[1])
    return (*roomy, *usual)


@fact
def paces(spec: AttentionSpec) -> tuple[Pace, ...]:
    """The tiles among which the lengths of a call decide: those that were measured, and whose registers the spec leaves."""
    measured = [p for p in of_head_size(spec, PACES) if kind(spec) in p.serves]
    return tuple(p for p in measured if registers(spec, p.tile) <= register_split(spec, p.tile)[1])


def depends_on_lengths(spec: AttentionSpec) -> bool:
    """Whether the tile is chosen anew for the lengths of a call."""
    return replace(spec.schedule, rung="auto") == Schedule() and len(paces(spec)) > 1


def visited(bounds: TileBounds, problem: Problem) -> Visited:
    """By the closed forms for the first, the middle and the last row; half of all keys where a form reads params or inputs."""
    if bounds.even:
        return Visited(True, problem.keys, problem.keys)
    found = keys_of_rows(bounds, (0, problem.rows // 2, problem.rows - 1), problem.rows, problem.keys)
    if not found:
        return Visited(False, 0, problem.keys / 2)
    first, middle, last = found
    return Visited(False, min(found), (first + 4 * middle + last) / 6)  # Simpson's rule


@dataclass(frozen=True, slots=True)
class ByLengths:
    """The choice that is left for the lengths of a call: which of the tiles of `paces`."""

    bounds: TileBounds
    paces: tuple[tuple[Pace, int], ...]  # with the rows that visit the same keys

    def fastest(self, problem: Problem) -> Tile:
        """The fastest tile for these lengths, by the model of `Pace`."""
        keys = visited(self.bounds, problem)
        return min(self.paces, key=lambda pair: pair[0].time(problem, keys, pair[1]))[0].tile


def by_lengths(spec: AttentionSpec) -> ByLengths | None:
    """The choice that the lengths of a call decide; None if there is one tile for all lengths."""
    if not depends_on_lengths(spec):
        return None
    same = [(p, WARPGROUP_ROWS if own_tiles(spec, p.tile) else p.tile.block_q) for p in paces(spec)]
    return ByLengths(tile_bounds(spec), tuple(same))


def tiles(spec: AttentionSpec, arch: Arch) -> tuple[Tile, ...]:
    return fitting(arch, (*preferred_tiles(spec), *POSSIBLE), lambda t: cost(spec, t))


def propose(spec: AttentionSpec, arch: Arch) -> Plan:
    """The preferred tile that fits, whatever the lengths of a call; the decisions say why."""
    refuse(spec, arch)
    tile = pick_tile(spec, arch, preferred_tiles(spec), POSSIBLE, lambda t: cost(spec, t))
    plan = with_tile(spec, arch, tile, "stated in the spec" if spec.schedule.block_q else WHY_TILE)
    others = ", ".join(f"{p.tile.block_q} x {p.tile.block_kv}" for p in paces(spec) if p.tile != tile)
    if not depends_on_lengths(spec) or not others:
        return plan
    return replace(plan, decisions=(*plan.decisions, Decision("other tiles", others, WHY_OTHERS)))


def propose_for_lengths(spec: AttentionSpec, arch: Arch, tile: Tile) -> Plan:
    """The plan of a tile that `by_lengths` found."""
    return with_tile(spec, arch, tile, WHY_LENGTHS)


def with_tile(spec: AttentionSpec, arch: Arch, tile: Tile, why: str) -> Plan:
    """The plan of a tile that fits, and what else follows from it."""
    q, kv, stages, groups = tile.block_q, tile.block_kv, tile.stages, consumers(tile)
    producer, consumer = register_split(spec, tile)
    own = staged(spec)
    sums = row_sums(spec, arch, tile)
    ones = sums == "products"
    out = output_slabs(spec, arch, tile, ones)
    sizes, t = shared_bytes(spec, tile, out, ones), spec.dtype.name
    assert all(sizes[name] % SWIZZLE_ATOM == 0 for name in "QKVO"), sizes
    holds, fragments = q_in_registers(spec, tile), q_registers(spec)
    d, dv = slabs(spec.head_dim), slabs(spec.head_dim_v)
    told = tile_bounds(spec).per_tile  # the producer classifies tiles, and tells the consumers
    buffers = lay_out(
        (
            "Q",
            sizes["Q"],
            f"{t} [{d}][{q}][{SLAB}], the query rows"
            if holds
            else f"{t} [{groups}][{d}][{WARPGROUP_ROWS}][{SLAB}], the query rows of each consumer",
        ),
        ("K", sizes["K"], f"{t} [{stages}][{d}][{kv}][{SLAB}], the keys of {stages} tiles"),
        ("V", sizes["V"], f"{t} [{stages}][{dv + ones}][{kv}][{SLAB}], the values of {stages} tiles" + ", and ones" * ones),
        ("O", sizes["O"], f"{t} [{4 * groups}][{out}][16][{SLAB}], output rows of each warp on their way"),
        ("BARRIERS", sizes["BARRIERS"], f"mbarrier [{q_barriers(spec, tile)} + 4 * {stages}], see the kernel"),
        ("PLACES", sizes["PLACES"], f"int [2][{place_words(spec, tile)}], which rows and head " + WHOSE[holds]),
        *(
            [("VISITS", sizes["VISITS"], f"int [{stages} + 2], which tile comes after that of a stage, and which comes first")]
            if told
            else []
        ),
        *([("KEY_VECTORS", sizes["KEY_VECTORS"], key_vector_layout(own, tile))] if own.keys else []),
    )
    decisions = (
        Decision("schedule", "hopper", f"{t} on tensor cores by wgmma, tiles copied by TMA, which {arch.name} has"),
        *precision_decisions(spec),
        *one_score_decisions(spec),
        *bounded_decisions(spec),
        Decision(
            "warpgroups",
            f"1 + {groups}",
            f"one copies; {groups} compute 64 rows each, the weights of one beside the products of another",
        ),
        Decision("BLOCK_Q x BLOCK_KV", f"{q} x {kv}", why),
        Decision("stages", str(stages), "the copies of later tiles are under way while these are used"),
        Decision(
            "registers",
            f"{producer} and {consumer} a thread",
            f"copying needs few; about {registers(spec, tile)} hold O, S and P",
        ),
        Decision(
            "Q",
            "in registers" if holds else "in shared memory",
            f"its fragments take {fragments} registers a thread" + ("; its buffer is free for the next" if holds else ""),
        ),
        *([Decision("consumers' tiles", "each its own", WHY_OWN)] if own_tiles(spec, tile) else []),
        *([Decision("row sums", *WHY_SUMS[sums])] if spec.normalize == "softmax" else []),
        *(
            [Decision("slack", f"a row's own, up to the weight of {heavy(sums)} keys, or more where there are many", WHY_SLACK)]
            if adapts_slack(spec)
            else []
        ),
        Decision(
            "O in shared memory",
            f"{out} of {dv} slabs a warp",
            "copied out in the background" + ("" if out == dv else "; there is no room for more"),
        ),
        Decision(
            "blocks",
            "one for each SM",
            "a persistent kernel: each block takes rows from a counter, the longest first, and copies ahead for the next",
        ),
        Decision("swizzle", "128 bytes", LAYOUT + ", so that neither TMA nor wgmma meets a bank conflict"),
        *staging_decisions(own),
    )
    roles = Roles(groups, producer, consumer, out, sums, shift(spec), own_tiles(spec, tile))
    bounds = tile_bounds(spec)
    return Plan("hopper", "hopper", arch, q, kv, tile.warps, stages, bounds, decisions, buffers, holds, roles=roles, staged=own)


def key_vector_layout(own: Staged, tile: Tile) -> str:
    dtypes = {e.stored.name for e in own.keys}
    slots, kv = key_vector_slots(tile), tile.block_kv
    vectors = f"[{len(own.keys)}][{kv}]" if len(dtypes) == 1 else f"[{own.key_bytes * kv}]"
    return f"{dtypes.pop() if len(dtypes) == 1 else 'byte'} [{slots}]{vectors}, the key vectors of {slots} tiles"


def staging_decisions(own: Staged) -> Iterator[Decision]:
    if own.keys:
        vectors = ", ".join(expression_to_text(e.gather) for e in own.keys)
        yield Decision("key vectors", vectors, WHY_KEYS)
    if own.rows:
        elements = ", ".join(expression_to_text(e.gather) for e in own.rows)
        yield Decision("row elements", elements, "each thread has two rows: it reads theirs once, under the first product")


WHY_SUMS: dict[RowSums, tuple[str, str]] = {
    "products": ("by P V", "columns of ones beside V: no addition for each weight, and each weight counts as rounded in P"),
    "weights, the heaviest rounded": (
        "by threads",
        "of the weights, the heaviest of each lane as P rounds it: this rounding then moves O less",
    ),
    "weights": ("by threads", "of the weights before rounding"),
}
WHY_OWN = (
    "a tile has fewer keys than a block has rows, so some tiles have no key for a consumer's 64 rows: it skips these; "
    "consumers take turns with the rows, so that each has as much to do"
)
WHY_SLACK = "a score that would weigh more becomes the maximum: its weight is then 1, which rounding does not change"
WHY_KEYS = (
    "in shared memory: the producer reads them while it waits for a stage, where a consumer would read each pair's from global "
    "memory between its products"
)
WHY_LENGTHS = "the fastest for these lengths, by its rate in the loop and the extra cost of each block of rows"
WHY_OTHERS = "used instead for calls whose lengths make them faster"
WHY_TILE = "the first preferred tile whose O, S and P fit a consumer's registers, and whose stages fit shared memory"
