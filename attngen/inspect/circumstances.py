"""What can happen to the blocks of a kernel, as a table: each circumstance in words, the plans that it applies to, and whether
it occurs in a problem. A kernel that is wrong in one of them alone is right in all problems without it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from attngen.inspect.block_work import Block, Case, held_by, visits_keys, visits_rows
from attngen.inspect.known import LAYOUTS as LAYOUT_WORDS
from attngen.inspect.known import spoiled_row
from attngen.plan import Plan
from attngen.plan.axes import KEYS
from attngen.plan.block_map import EMPTY, FULL, PARTIAL
from attngen.plan.bounded_scores import RESCALE_EXPONENT
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.alternatives import Alternative
from attngen.reference.definition import is_power_of_2
from attngen.reference.problems import Scores as FarApart
from attngen.reference.problems import broadcast_dims, captured_sinks
from attngen.schedules.hopper_backward.plan import FOUND
from attngen.schedules.parts.wgmma import WARPGROUP_ROWS
from attngen.spec.attention import AttentionSpec, Input
from attngen.spec.dtypes import from_storage
from attngen.spec.expr import Apply, Expr, constant, rewrite, walk
from attngen.spec.gradient import QKV
from attngen.spec.operator import FALSE, TRUE, ZERO, add, maximum, minimum

FEW_ROWS = 8  # fewer than any warp has
MUCH = 2.0**27  # numbers of fp32 of that size are 8 or more apart: its product with log2(e) is no exponent to compute with
OVERFLOW = 100.0  # a score whose exponential is infinite in fp32
NOTICED = 0.1  # a relative error of weights that no rounding hides
MOST_APART = 10.0  # scores of a row none of whose weights is 0 in 16 bits
ALIGNED = 8  # elements: rows of captured tensors then begin at multiples of 16 bytes

Scores = FarApart | Literal["steep"]


@dataclass(frozen=True, slots=True)
class Circumstance:
    """`what` happens, in words, to plans that it `applies` to. `absent` says why it may not: what the mask is like.

    `by_values`: params and captured tensors may decide whether it occurs, not sizes alone. `scores`: those that it takes,
    if they are not the usual ones.
    """

    name: str
    what: str
    applies: Callable[[Plan], bool]
    occurs: Callable[[Case], bool]
    absent: str = ""
    by_values: bool = False
    scores: Scores | None = None

    def __str__(self) -> str:
        return self.what


Goal = Alternative | Circumstance


def _every(plan: Plan) -> bool:
    return True


def _masked(plan: Plan) -> bool:
    return plan.facts.spec.mask is not None


def _tiled(plan: Plan) -> bool:
    return plan.schedule.is_tiled


def _persistent(plan: Plan) -> bool:
    return plan.schedule.is_warp_specialized


def _is_queued(plan: Plan) -> bool:
    """Whether blocks take rows from a queue, which are work also without keys."""
    return _persistent(plan) and visits_keys(plan)


def _lists_tiles(plan: Plan) -> bool:
    """Whether producers have lists of tiles, and a problem with more of them takes a second or two: with several heads, wider
    rows or larger tiles it takes longer, and the code of a list is the same."""
    spec = plan.facts.spec
    is_small = spec.q_heads is None and max(spec.head_dim, spec.head_dim_v) <= 64 and plan.block_q == WARPGROUP_ROWS
    return _persistent(plan) and bool(plan.wanted) and is_small


def _decode(plan: Plan) -> bool:
    return plan.schedule.packs_heads


def _reads_pairs(plan: Plan) -> bool:
    return bool(plan.staged.pairs or plan.written_pairs)


def _reads_words(plan: Plan) -> bool:
    return _tiled(plan) and not plan.schedule.on_tensor_cores


def rescales(plan: Plan) -> bool:
    """Whether kernels of `plan` multiply sums of earlier tiles when the maximum of a row rises."""
    return plan.schedule.is_fused and not plan.wanted and plan.facts.spec.normalize == "softmax" and plan.facts.shift is None


# --- sizes

UNEQUAL = Circumstance(
    "unequal_lengths", "q_len other than kv_len", _every, lambda case: case.sizes["q_len"] != case.sizes["kv_len"]
)
SIZES = (
    UNEQUAL,
    Circumstance("batches", "several batches", _every, lambda case: case.sizes["batch"] > 1),
    Circumstance("heads", "several heads", _every, lambda case: case.sizes["q_heads"] > 1),
    Circumstance(
        "groups",
        "several key/value heads, each of several query heads",
        lambda plan: plan.facts.spec.q_heads is None,
        lambda case: case.sizes["kv_heads"] > 1 and case.group_size > 1,
    ),
    Circumstance(
        "ragged_rows",
        "rows that do not fill the last block",
        _every,
        lambda case: not case.is_empty and case.sizes["q_len"] % case.tile[0] != 0,
    ),
    Circumstance(
        "ragged_keys",
        "keys that do not fill the last tile",
        _every,
        lambda case: not case.is_empty and case.sizes["kv_len"] % case.tile[1] != 0,
    ),
    Circumstance(
        "few_last_rows",
        "a last block of rows with fewer rows than a warp has",
        _tiled,
        lambda case: not case.is_empty and 0 < case.sizes["q_len"] % case.tile[0] < FEW_ROWS,
    ),
    Circumstance(
        "more_rows",
        "more rows than keys, by a block or more",
        _every,
        lambda case: not case.is_empty and case.sizes["q_len"] >= case.sizes["kv_len"] + case.tile[0],
    ),
    Circumstance(
        "rows_past_keys",
        "a block of rows after the last key, and a last tile that keys do not fill",
        _tiled,
        lambda case: case.sizes["q_len"] >= case.sizes["kv_len"] + case.tile[0] and case.sizes["kv_len"] % case.tile[1] > 0,
    ),
    Circumstance(
        "more_keys",
        "more keys than rows, by a tile or more",
        _every,
        lambda case: not case.is_empty and case.sizes["kv_len"] >= case.sizes["q_len"] + case.tile[1],
    ),
    Circumstance("no_batch", "a batch of 0", _every, lambda case: case.sizes["batch"] == 0),
    Circumstance("no_rows", "a q_len of 0", _every, lambda case: case.sizes["batch"] > 0 and case.sizes["q_len"] == 0),
    Circumstance(
        "no_keys",
        "a kv_len of 0",
        _every,
        lambda case: case.sizes["kv_len"] == 0 and case.works >= (case.processors + 2 if _is_queued(case.plan) else 1),
    ),
    Circumstance(
        "aligned_pairs",
        "captured rows that begin at multiples of 16 bytes",
        _reads_pairs,
        lambda case: not case.is_empty and case.sizes["kv_len"] % ALIGNED == 0,
    ),
    Circumstance(
        "unaligned_pairs",
        "captured rows that do not begin at multiples of 4 bytes",
        _reads_pairs,
        lambda case: case.sizes["kv_len"] % 2 == 1 and case.sizes["q_len"] > 1,
    ),
)

# --- sequences


def has_sequences(plan: Plan) -> bool:
    """Whether sequences of a call may have several lengths, and results that are compared one by one."""
    kernel = plan.facts.spec.kernel
    return (kernel.is_packed or kernel.is_counted) and (not plan.wanted or bool({*QKV} & {*plan.wanted}))


def _is_paged(plan: Plan) -> bool:
    kernel = plan.facts.spec.kernel
    return kernel.is_paged and kernel.page_size is None


SEQUENCES = (
    Circumstance(
        "sequence_without_rows",
        "a sequence without rows, between others",
        lambda plan: has_sequences(plan) and plan.facts.spec.kernel.is_packed,
        lambda case: any(rows == 0 for rows, _ in case.lengths),
    ),
    Circumstance(
        "sequence_without_keys",
        "a sequence of rows without keys, beside one of several tiles of keys",
        has_sequences,
        lambda case: (
            any(rows > 0 and keys == 0 for rows, keys in case.lengths)
            and any(rows > 0 and keys > case.tile[1] for rows, keys in case.lengths)
        ),
    ),
    Circumstance(
        "first_sequence_without_keys",
        "a first sequence without keys",
        has_sequences,
        lambda case: bool(case.lengths) and case.lengths[0][1] == 0,
    ),
    Circumstance(
        "wrong_lengths",
        "numbers of rows or keys outside of the tensors",
        has_sequences,
        lambda case: case.wrong_lengths and (case.page_size == 1 or not _is_paged(case.plan)),
    ),
    Circumstance(
        "page_of_one_row",
        "pages of one row, and a sequence with several",
        _is_paged,
        lambda case: case.page_size == 1 and not case.is_empty,
    ),
    Circumstance(
        "page_of_a_tile",
        "pages of as many rows as a tile has keys, the last one filled in part",
        lambda plan: _is_paged(plan) and _tiled(plan),
        lambda case: case.page_size == case.tile[1] and any(keys % case.page_size for _, keys in case.lengths),
    ),
    Circumstance(
        "page_across_tiles",
        "pages that begin and end within a tile",
        lambda plan: _is_paged(plan) and _tiled(plan),
        lambda case: case.page_size % 2 == 1 and 1 < case.page_size < case.tile[1],
    ),
)

# --- rows and keys

ROWS_AND_KEYS = (
    Circumstance(
        "row_without_keys",
        "a row without keys",
        _masked,
        lambda case: any(not pairs.any(1).all() for pairs in case.pairs) and not case.is_empty,
        "each row has a key",
        by_values=True,
    ),
    Circumstance(
        "block_of_both_rows",
        "a block of which some rows have keys and others have none",
        _masked,
        lambda case: any(_is_mixed(pairs.any(1), case.tile[0]) for pairs in case.pairs),
        "all rows of a block have keys, or none has",
        by_values=True,
    ),
    Circumstance(
        "key_without_rows",
        "a key that no row sees",
        lambda plan: _masked(plan) and bool(plan.wanted),
        lambda case: any(not pairs.any(0).all() for pairs in case.pairs) and not case.is_empty,
        "each key is seen by a row",
        by_values=True,
    ),
    Circumstance(
        "tile_of_both_keys",
        "a tile of which a row sees some keys, and no row sees others",
        lambda plan: _masked(plan) and _tiled(plan) and bool(plan.wanted),
        lambda case: any(_is_mixed(pairs.any(0), case.tile[1]) for pairs in case.pairs),
        "all keys of a tile are seen, or none is",
        by_values=True,
    ),
)


def _is_mixed(has: Any, block: int) -> bool:
    starts = range(0, len(has), block)
    return any(has[i : i + block].any() and not has[i : i + block].all() for i in starts)


# --- tiles of a block

CLASSES = {
    EMPTY: Circumstance(
        "skipped_tile",
        "a tile that is skipped: the mask forbids all of its pairs",
        lambda plan: _tiled(plan) and _masked(plan),
        lambda case: _has_kind(case, EMPTY),
        "no tile can be skipped",
        by_values=True,
    ),
    PARTIAL: Circumstance(
        "partial_tile",
        "a tile of which the mask allows some pairs",
        lambda plan: _tiled(plan) and _masked(plan),
        lambda case: _has_kind(case, PARTIAL),
        "each tile is skipped or full",
        by_values=True,
    ),
    FULL: Circumstance(
        "full_tile",
        "a tile of which the mask allows all pairs",
        _tiled,
        lambda case: _has_kind(case, FULL),
        "no tile is full",
        by_values=True,
    ),
}


def _has_kind(case: Case, kind: int) -> bool:
    """Of large problems each class is taken to occur."""
    return not case.is_empty and (case.is_large or any(bool((case.kinds(b, h) == kind).any()) for b, h in case.heads))


Blocks = Callable[[Case], tuple[Block, ...]]


def _of_blocks(
    prefix: str, block: str, tiles: str, axis: str, applies: Callable[[Plan], bool], blocks: Blocks
) -> Iterator[Circumstance]:
    """What can happen to blocks of one axis that visit tiles of the other."""

    def one(name: str, what: str, absent: str, occurs: Callable[[Case, Block], bool], masked: bool = True) -> Circumstance:
        return Circumstance(
            f"{prefix}_{name}",
            what.format(block=block, tiles=tiles),
            (lambda plan: applies(plan) and _masked(plan)) if masked else applies,
            lambda case: any(occurs(case, of) for of in blocks(case)),
            absent.format(block=block, tiles=tiles),
            by_values=True,
        )

    def whole(case: Case, of: Block) -> bool:
        return bool(of.visited) and not (of.kinds == EMPTY).any()

    yield one("no_tile", "{block} that visits no tile of {tiles}", "{block} always has {tiles}", lambda _, of: not of.visited)
    yield one("one_tile", "{block} that visits one tile of {tiles} alone", "", lambda _, of: len(of.visited) == 1, masked=False)
    yield one(
        "several_tiles", "{block} that visits several tiles of {tiles}", "", lambda _, of: len(of.visited) > 1, masked=False
    )
    yield one(
        "first_partial",
        "{block} whose first tile of {tiles} is partial, and a later one full",
        "the first tile of {block} is full, or none is",
        lambda _, of: of.first == PARTIAL and bool((of.kinds == FULL).any()),
    )
    yield one(
        "last_partial",
        "{block} whose last tile of {tiles} is partial, and an earlier one full",
        "the last tile of {block} is full, or none is",
        lambda _, of: of.last == PARTIAL and bool((of.kinds == FULL).any()),
    )
    yield one(
        "all_full",
        "{block} all of whose tiles of {tiles} are full",
        "{block} has a tile that is partial",
        lambda _, of: bool(of.visited) and bool((of.kinds[list(of.visited)] == FULL).all()),
        masked=False,
    )
    yield one(
        "later_first",
        "{block} that skips the first tile of {tiles}",
        "{block} visits the first tile",
        lambda _, of: bool(of.visited) and of.kinds[0] == EMPTY,
    )
    yield one(
        "earlier_last",
        "{block} that skips the last tile of {tiles}",
        "{block} visits the last tile",
        lambda _, of: bool(of.visited) and of.kinds[-1] == EMPTY,
    )
    yield one(
        "skips_between",
        "{block} that skips a tile of {tiles} between two that it visits",
        "all tiles from the first to the last are visited",
        lambda _, of: of.skips_between,
    )
    yield Circumstance(
        f"{prefix}_stages_again",
        f"each buffer of a tile of {tiles} filled again, by the same block or warp",
        applies,
        lambda case: _fills(case, blocks(case)) >= fills_of(case.plan) * case.plan.stages,
        f"{block} visits too few tiles",
        by_values=True,
    )


def fills_of(plan: Plan) -> int:
    """How many times each stage of a ring is to be filled: twice; three times if mbarriers guard it, which have two phases."""
    return 3 if plan.schedule.by_tma or getattr(plan.own, "copies", "") == "tma" else 2


def _fills(case: Case, blocks: tuple[Block, ...]) -> int:
    """The tiles that pass through one ring of stages, at most. On the emulated device the first block of a persistent kernel
    takes all work tiles but the first of each other block."""
    if case.plan.schedule.packs_heads:
        return max((int(case.tiles_of_warps(block).max()) for block in blocks), default=0)
    if not case.plan.schedule.is_warp_specialized:
        return max((len(block.visited) for block in blocks), default=0)
    visits = sorted(len(block.visited) for block in blocks)
    return sum(visits[: max(len(visits) - case.processors + 1, 0)])


OF_ROWS = tuple(_of_blocks("rows", "a block of rows", "keys", "q", visits_keys, lambda case: case.row_blocks))
OF_KEYS = tuple(_of_blocks("keys", "a block of keys", "rows", "k", visits_rows, lambda case: case.key_blocks))

# --- schedules

OF_WORD = 32  # tiles, whose kinds are the bits of a word


ROUND = 4  # elements of a row that a thread reads at once, at most


def _classifies(plan: Plan) -> bool:
    return plan.bounds.per_tile or (plan.row_bounds is not None and plan.row_bounds.per_tile)


def _reads_a_second_word(block: Block) -> bool:
    visited = {*block.visited}
    return any(tile >= OF_WORD and tile % OF_WORD not in visited for tile in visited)


def _passes_a_word(block: Block) -> bool:
    """Whether none of the other tiles of a word is visited, and a later one is."""
    visited = (-1, *block.visited)
    return any((tile + 1) // OF_WORD < following // OF_WORD for tile, following in pairwise(visited))


def _changes_in_a_tile(case: Case, rises: bool, at_end: bool) -> bool:
    """Whether a captured vector of integers changes once in a tile of keys, in its first half or at its last element, and a
    later block of rows has the tile's last number."""
    rows, keys = case.tile
    for declared in case.spec.inputs:
        if declared.dtype.kind != "int" or not declared.dims or declared.dims[-1] not in ("q_len", "kv_len"):
            continue
        vector = case.problem.inputs[declared.name].reshape(-1, case.problem.inputs[declared.name].shape[-1])[:1].ravel()
        for first in range(0, len(vector) - keys, keys):
            of_tile = vector[first : first + keys].astype(np.int64)
            changes = np.flatnonzero(np.diff(of_tile))
            if len(changes) != 1 or (of_tile[-1] > of_tile[0]) != rises:
                continue
            if changes[0] != keys - 2 if at_end else changes[0] + 1 >= keys // 2:
                continue
            later = -(-(first + keys) // rows) * rows
            if later + rows <= len(vector) and (vector[later : later + rows] == of_tile[-1]).all():
                return True
    return False


def reads_ranges(plan: Plan) -> bool:
    """Whether blocks look up the ranges of captured integers in a tile."""
    of_keys = bool(plan.bounds.spans) and visits_keys(plan)
    return of_keys or (plan.row_bounds is not None and bool(plan.row_bounds.spans) and visits_rows(plan))


IN_A_TILE = tuple(
    Circumstance(
        f"{word}_at_end" if at_end else f"{word}_in_first_half",
        f"a captured vector that {words} once, {where} of a tile, and a later block of its last number alone",
        reads_ranges,
        lambda case, word=word, at_end=at_end: not case.is_empty and _changes_in_a_tile(case, word == "rise", at_end),  # type: ignore[misc]
        "no range of a tile is of integers along a sequence",
    )
    for at_end, where in enumerate(("in the first half", "at the last element"))
    for word, words in (("rise", "rises"), ("fall", "falls"))
)


def classifies_together(plan: Plan, bounds: MaskBounds | None) -> bool:
    """Whether the threads of a block classify as many tiles at once by these bounds, one each."""
    schedule = plan.schedule
    together = schedule.on_tensor_cores and not (schedule.by_tma or schedule.packs_heads)
    return together and bounds is not None and bounds.per_tile


def _again(axis: str, block: str, tile: str, applies: Callable[[Plan], bool], blocks: Blocks) -> Circumstance:
    return Circumstance(
        f"{axis}_classified_again",
        f"{block} that visits {tile} after those that its threads classify at once",
        applies,
        lambda case: any(of.visited and of.visited[-1] >= case.plan.threads for of in blocks(case)),
        "rows and keys are too few in all of them",
        by_values=True,
    )


CLASSIFIED = (
    _again(
        "rows",
        "a block of rows",
        "a tile",
        lambda plan: visits_keys(plan) and classifies_together(plan, plan.bounds),
        lambda case: case.row_blocks,
    ),
    _again(
        "keys",
        "a block of keys",
        "a tile of rows",
        lambda plan: visits_rows(plan) and classifies_together(plan, plan.row_bounds),
        lambda case: case.key_blocks,
    ),
)

OWN = (
    Circumstance(
        "empty_word",
        "a block of rows that visits none of 32 tiles of keys, or none of the rest of 32, and a later one",
        lambda plan: plan.bounds.per_tile and visits_keys(plan) and not plan.wanted,
        lambda case: any(map(_passes_a_word, case.row_blocks)),
        "each block visits a tile of each 32, or none after them",
    ),
    Circumstance(
        "second_word",
        "a block that visits a tile after the first 32, and skips the tile with its place among these",
        lambda plan: bool(plan.wanted) and plan.schedule.on_tensor_cores and _classifies(plan),
        lambda case: any(_reads_a_second_word(of) for of in (*case.row_blocks, *case.key_blocks)),
        "each block visits the same tiles of each 32",
    ),
    Circumstance(
        "several_rounds",
        "a block of few rows, one with a key after those that its threads read at once",
        lambda plan: not plan.schedule.is_fused,
        lambda case: (
            not case.is_empty
            and case.sizes["q_len"] < FEW_ROWS  # many rows of so many keys take long
            and bool(case.allowed(0, 0)[:, ROUND * case.plan.threads :].any())
        ),
        "a few rows have no key so far to the right",
    ),
    Circumstance(
        "second_work_tile",
        "a block that takes a second work tile, and a third",
        _persistent,
        lambda case: not case.is_empty and case.works >= case.processors + 2,
    ),
    Circumstance(
        "idle_processor",
        "fewer work tiles than multiprocessors",
        _persistent,
        lambda case: not case.is_empty and case.works < case.processors,
    ),
    Circumstance(
        "consumer_without_tiles",
        "a consumer without tiles, beside one that has some",
        lambda plan: bool(plan.consumer_rows) and _masked(plan),
        lambda case: any(
            bool(block.visited) and any((part == EMPTY).all() for part in block.parts) for block in case.row_blocks
        ),
        "consumers of a block always have tiles together",
        by_values=True,
    ),
    Circumstance(
        "first_rows_missing",
        "a first block in which a consumer has no rows",
        lambda plan: bool(plan.consumer_rows),
        lambda case: not case.is_empty and case.plan.missing_rows(case.sizes["q_len"]) > 0,
    ),
    Circumstance(
        "empty_work_tile",
        "a block with a work tile without tiles, and others that have some",
        lambda plan: _persistent(plan) and _masked(plan),
        lambda case: (
            case.processors == 1
            and any(any(not b.visited for b in of) and any(b.visited for b in of) for of in (case.row_blocks, case.key_blocks))
        ),
        "each work tile has tiles",
        by_values=True,
    ),
    Circumstance(
        "empty_work_tiles",
        "a block with two work tiles without tiles, one after another, and others that have some",
        lambda plan: _persistent(plan) and _masked(plan),
        lambda case: (
            case.processors == 1
            and any(
                any(b.visited for b in of) and any(not a.visited and not b.visited for a, b in pairwise(of))
                for of in (case.row_blocks, case.key_blocks)
            )
        ),
        "no two work tiles side by side are without tiles",
        by_values=True,
    ),
    *(
        Circumstance(
            f"many_tiles_of_{tiles}",
            f"a block of {held} that visits more than {FOUND} tiles of {tiles}: they do not fit the list of its producer",
            lambda plan, visits=visits: _lists_tiles(plan) and visits(plan),  # type: ignore[misc]
            lambda case, held=held: any(  # type: ignore[misc]
                len(of.visited) > FOUND for of in (case.row_blocks if held == "rows" else case.key_blocks)
            ),
            f"a block of {held} visits too few tiles",
            by_values=True,
        )
        for held, tiles, visits in (("rows", "keys", visits_keys), ("keys", "rows", visits_rows))
    ),
    Circumstance(
        "sections",
        "several sections of heads that are numbered together, the last one with fewer heads",
        lambda plan: plan.heads_in_l2 is not None,
        lambda case: (
            case.sections and not case.is_empty and case.sizes["kv_heads"] * case.sizes["batch"] > 2 and _has_blocks(case)
        ),
    ),
    Circumstance("one_split", "keys that one block reads", _decode, lambda case: not case.is_empty and case.splits == 1),
    Circumstance(
        "split_without_keys",
        "a split without keys, beside one that has some",
        lambda plan: _decode(plan) and _masked(plan),
        lambda case: case.splits > 1 and any(_has_idle(case.tiles_of_warps(b).sum(1)) for b in case.row_blocks),
        "each split has keys",
        by_values=True,
    ),
    Circumstance(
        "warp_without_keys",
        "a warp without keys in a split that has some",
        lambda plan: _decode(plan) and plan.warps > 1,
        lambda case: any(any(map(_has_idle, case.tiles_of_warps(b))) for b in case.row_blocks),
        by_values=True,
    ),
    Circumstance(
        "one_part",
        "a group of query heads that one block adds up",
        lambda plan: bool(plan.wanted) and getattr(plan.own, "parts", None) is not None,
        lambda case: not case.is_empty and case.group_size > 1 and case.parts == 1,
    ),
    Circumstance(
        "more_parts",
        "a group of query heads in more than two parts",
        lambda plan: bool(plan.wanted) and getattr(plan.own, "parts", None) is not None,
        lambda case: not case.is_empty and case.parts > 2,
        "groups have two query heads",
    ),
    Circumstance(
        "several_parts",
        "a group of query heads in parts, of a block each",
        lambda plan: bool(plan.wanted) and getattr(plan.own, "parts", None) is not None,
        lambda case: not case.is_empty and case.parts > 1,
    ),
)


# The plan's schedules that accept any layout, and copy by wider words where the layout allows it
ARRAYS, GRADIENTS = ("q", "k", "v"), ("dout",)
LAYOUTS = tuple(
    Circumstance(
        f"{layout}_of_{name}",
        f"{words} of {name}",
        (lambda plan: _reads_words(plan) and bool(plan.wanted)) if name in GRADIENTS else _reads_words,
        lambda case, at=(name, layout): case.laid_out == at and not case.is_empty,  # type: ignore[misc]
    )
    for layout, words in LAYOUT_WORDS.items()
    for name in (*ARRAYS, *GRADIENTS)
)


def _has_blocks(case: Case) -> bool:
    """Whether a head has several blocks of rows; of keys, if no block is of rows."""
    rows, keys = held_by(case.plan)
    return case.sizes["q_len"] > rows if visits_keys(case.plan) else case.sizes["kv_len"] > keys


def _has_idle(tiles: Any) -> bool:
    return bool(tiles.any()) and not tiles.all()


# --- values


def is_broadcast(spec: AttentionSpec) -> bool:
    """Whether a captured tensor may have one element along a dimension that has several."""
    return any(dim in broadcast_dims(spec) for declared in spec.inputs for dim in declared.dims)


def _sinks(case: Case) -> Any:
    """The sinks that captured tensors have; none of a problem without rows."""
    found = [from_storage(case.problem.inputs[name]).ravel() for name in captured_sinks(case.spec)]
    return np.concatenate(found) if case.sizes["q_len"] and case.sizes["batch"] else np.empty(0)


def _captures_sinks(plan: Plan) -> bool:
    return bool(captured_sinks(plan.facts.spec)) and not plan.wanted


SPOILED_SINKS = (
    Circumstance(
        "huge_sink", "a sink near the largest number", _captures_sinks, lambda case: bool((_sinks(case) > 1e38).any())
    ),
    Circumstance("sink_of_nan", "a sink of NaN", _captures_sinks, lambda case: bool(np.isnan(_sinks(case)).any())),
    Circumstance(
        "no_sink_nor_key_of_row",
        "a sink of -inf, of a row without keys beside rows with some",
        lambda plan: _captures_sinks(plan) and _masked(plan),
        lambda case: (
            not case.is_empty and bool((_sinks(case) == -np.inf).any()) and _is_mixed(case.allowed(0, 0).any(1), 2**31)
        ),
        "each row has a key",
    ),
    Circumstance(
        "no_sink_nor_key",
        "a sink of -inf, of rows without keys",
        _captures_sinks,
        lambda case: not case.sizes["kv_len"] and bool((_sinks(case) == -np.inf).any()),
    ),
)

BEYOND_KEYS = Circumstance(
    "number_beyond_keys",
    "a captured number that is larger than kv_len",
    lambda plan: any(_is_number(declared) for declared in plan.facts.spec.inputs),
    lambda case: (
        not case.is_empty
        and any(
            int(case.problem.inputs[declared.name].max(initial=0)) > case.sizes["kv_len"]
            for declared in case.spec.inputs
            if _is_number(declared)
        )
    ),
    "calls with such a number are refused, as it is an index",
    by_values=True,
)


def _is_number(declared: Input) -> bool:
    """Whether a captured tensor has integers that do not lie along a sequence: lengths, limits or indices."""
    return declared.dtype.kind == "int" and not {"q_len", "kv_len"} & {*declared.dims}


ONE_ELEMENT = Circumstance(
    "broadcast",
    "a captured tensor with one element for all batches or heads",
    lambda plan: is_broadcast(plan.facts.spec) and not plan.written_pairs,  # for whose gradients the caller takes another plan
    lambda case: (
        not case.is_empty
        and any(
            size == 1 and case.sizes[str(dim)] > 1
            for declared in case.spec.inputs
            for dim, size in zip(declared.dims, case.problem.inputs[declared.name].shape, strict=True)
            if dim in broadcast_dims(case.spec)
        )
    ),
)

ORDERS: dict[Scores, str] = {"falling": "fall", "rising": "rise"}


def _rises(case: Case, both: bool = True) -> bool:
    """Whether the first head has a row of RISES if its tiles are visited from the first one on, and one if from the last one
    on; or in one of these orders."""
    visited = _visited_maxima(case)
    return len(visited) > 1 and (all if both else any)((_rise(visited), _rise(visited[::-1])))


def _visited_maxima(case: Case) -> Any:
    """The largest scores of the rows of the first head in the tiles that one warp visits: [tiles, rows]."""
    if case.is_empty:
        return np.empty((0, 0))
    step = case.splits * case.plan.tile.warps if case.plan.schedule.packs_heads else 1
    return case.of_tiles(case.first_scores, -np.inf)[::step]


def _stays_huge(case: Case) -> bool:
    """Whether a row has weights that would overflow in a tile after that of its largest score, which exceeds MUCH."""
    visited = _visited_maxima(case)
    before = np.maximum.accumulate(visited)[:-1]
    return bool(((before > MUCH) & (visited[1:] > OVERFLOW) & (visited[1:] < before)).any())


def _fills_a_tile(case: Case) -> bool:
    """Whether a block of the first head visits several tiles, of which one is full: in partial ones scores are masked."""
    if not _tiled(case.plan):
        return True
    kinds = case.kinds(0, 0)
    return bool(((kinds == FULL).any(1) & ((kinds != EMPTY).sum(1) > 1)).any())


def _rise(maxima: Any) -> bool:
    """Whether a row's maximum of a tile exceeds those of the tiles before by RESCALE_EXPONENT powers of 2; [tiles, rows]."""
    before = np.maximum.accumulate(maxima)[:-1]
    with np.errstate(invalid="ignore"):  # tiles without pairs
        return bool(((maxima[1:] - before)[np.isfinite(before)] * np.log2(np.e) > RESCALE_EXPONENT).any())


def _joined_rows(case: Case) -> Any:
    """Which rows of the first head have keys in several splits."""
    if case.is_empty or case.splits == 1:
        return np.empty(0, bool)
    has_keys, warps = case.of_tiles(case.allowed(0, 0), False), case.plan.tile.warps
    # The warps of a split have neighbouring tiles: these distances lead to another split, wherever the first tile is
    return np.any([(has_keys[:-n] & has_keys[n:]).any(0) for n in range(warps, warps * (case.splits - 1) + 1)], axis=0)


def _joins_large(case: Case) -> bool:
    """Whether a score of one of these rows, among those that are looked at, is larger than OVERFLOW."""
    maxima = case.row_maxima if not case.is_empty else np.empty(0)
    joined = _joined_rows(case)[: len(maxima)]
    return bool((maxima[: len(joined)][joined] > OVERFLOW).any())


def _joins_nothing(case: Case) -> bool:
    """Whether keys are split, and a row has none."""
    if not all(case.sizes[name] for name in ("batch", "q_heads", "q_len")) or case.splits == 1:
        return False
    of_sequences = any(rows and not keys for rows, keys in case.lengths)
    return of_sequences or not all(case.allowed(*head).any(1).all() for head in case.heads)


def _saves_large_lse(plan: Plan) -> bool:
    return "lse_rest" in plan.saved


RISES = Circumstance(
    "rising_maximum",
    "a row whose maximum rises so far after its first tile that its sums are rescaled",
    rescales,
    _rises,
    scores="steep",
)
OVERFLOWS = Circumstance(
    "large_scores",
    "a row whose weights would overflow if its maximum were not subtracted",
    lambda plan: plan.facts.spec.normalize == "softmax" and plan.facts.shift is None,
    lambda case: not case.is_empty and _fills_a_tile(case) and bool((case.row_maxima > OVERFLOW).any()),
    scores="steep",
)
HUGE = Circumstance(
    "huge_scores",
    "rows whose largest score exceeds 2^27, beside others",
    lambda plan: plan.facts.spec.normalize == "softmax" and plan.facts.shift is None,
    lambda case: (
        not case.is_empty
        and bool((case.row_maxima > MUCH).any())
        and bool((case.row_maxima < OVERFLOW).any())
        and _fills_a_tile(case)
    ),
    scores="huge",
)
HUGE_BELOW = Circumstance(
    "huge_scores_below",
    "64 rows that see all keys of a tile, of which a row has a score that exceeds 2^27, and none of the first 32 has",
    lambda plan: _persistent(plan) and _saves_large_lse(plan),
    lambda case: not case.is_empty and _is_huge_below(case),
    "no tile is full",
    scores="huge",
)
STAYS_HUGE = Circumstance(
    "huge_scores_again",
    "a row whose largest score exceeds 2^27, with smaller ones in a later tile whose weights would overflow",
    rescales,
    _stays_huge,
    scores="huge",
)
NEGATIVE = Circumstance(
    "negative_scores",
    "a row whose scores are all negative, and whose maximum rises from tile to tile",
    rescales,
    lambda case: not case.is_empty and bool((case.row_maxima < 0).all()) and _fills_a_tile(case) and _rises(case, both=False),
    scores="negative",
)
POSITIVE = Circumstance(
    "positive_scores",
    "a row whose scores are all positive and far apart, and whose maximum rises from tile to tile",
    rescales,
    lambda case: not case.is_empty and _fills_a_tile(case) and _is_above_0(case) and _rises(case, both=False),
    scores="positive",
)
LOW = Circumstance(
    "low_scores",
    "a row whose scores all have exponentials of 0",
    lambda plan: plan.facts.spec.normalize == "softmax" and plan.facts.shift is None and not rescales(plan),
    lambda case: not case.is_empty and bool(((case.row_maxima < -OVERFLOW) & np.isfinite(case.row_maxima)).any()),
    scores="negative",
)
EQUAL = Circumstance(
    "equal_maxima",
    "a row whose largest scores are equal, and so large that fp32 cannot hold the logarithm of their number beside them",
    _saves_large_lse,
    lambda case: not case.is_empty and is_power_of_2(case.numbers) and _has_equal_maxima(case),
    "the scale is no power of 2, so that scores are not exact",
    scores="equal",
)
MIXED = Circumstance(
    "mixed_scores",
    "rows whose scores are all negative, and rows whose scores are all positive, of one thread",
    rescales,
    lambda case: not case.is_empty and _fills_a_tile(case) and _is_mixed_in_pairs(case) and _rises(case, both=False),
    scores="mixed",
)
FALLING, RISING = (
    Circumstance(
        f"{order}_scores",
        f"a row whose scores are all negative and {words} from tile to tile, all of a tile",
        rescales,
        lambda case: not case.is_empty and bool((case.row_maxima < 0).all()) and _fills_a_tile(case),
        scores=order,
    )
    for order, words in ORDERS.items()
)


def _has_equal_maxima(case: Case) -> bool:
    """Whether weights of a row differ by NOTICED or more if lse is one number of fp32."""
    scores, maxima = case.first_scores, case.row_maxima
    with np.errstate(divide="ignore", invalid="ignore"):  # rows without keys, or with NaN
        lse = maxima + np.log((scores == maxima[:, None]).sum(1).astype(np.float64))
        rest = np.abs(lse - lse.astype(np.float32))
    return bool((rest[np.isfinite(rest)] > NOTICED).any())


def _is_above_0(case: Case) -> bool:
    scores = case.first_scores
    return bool((scores[np.isfinite(scores)] > 0).all())


def _is_mixed_in_pairs(case: Case) -> bool:
    """Whether of two rows that a thread of a fragment has, 8 apart, the first or the second has negative scores alone."""
    whole = len(case.row_maxima) // 16 * 16
    first, second = np.moveaxis(case.row_maxima[:whole].reshape(-1, 2, 8), 1, 0)
    return bool(((first < 0) & (second > 0)).any() and ((first > 0) & (second < 0)).any())


def _is_huge_below(case: Case) -> bool:
    is_huge = case.row_maxima > MUCH
    sees_all = case.of_tiles(case.allowed(0, 0, slice(0, len(is_huge))).astype(np.float32) * -1, -1.0)
    starts = range(0, len(is_huge) - 63, 64)
    return any(
        not is_huge[i : i + 32].any() and is_huge[i + 32 : i + 64].any() and bool((sees_all[:, i : i + 64] == -1).all(1).any())
        for i in starts
    )


def _has_low_ends(case: Case) -> bool:
    """Whether the last block of rows and the last tile of keys are not full, and scores are so far below 0 that exp(0 - lse)
    overflows."""
    ragged = not case.is_empty and all(case.sizes[name] % n for name, n in zip(("q_len", "kv_len"), case.tile, strict=True))
    return ragged and bool((case.row_maxima < -OVERFLOW).all() and np.isfinite(case.row_maxima[-1]))


def _reads_lse(plan: Plan) -> bool:
    return "lse" in plan.saved and _tiled(plan)


LOW_ENDS = Circumstance(
    "low_ends",
    "a last block of rows and a last tile of keys that are not full, of scores whose exponentials are 0",
    _reads_lse,
    _has_low_ends,
    scores="negative",
)
LOW_UNFILLED = Circumstance(
    "low_unfilled",
    "a block of rows that sees each key of a last tile which keys do not fill, of scores whose exponentials are 0",
    _reads_lse,
    lambda case: _has_low_ends(case) and _sees_unfilled(case),
    scores="negative",
)


def _sees_unfilled(case: Case) -> bool:
    """Whether a block of rows of the first head would visit a full tile, if keys filled the last one."""
    rows, keys = case.tile
    sees_all: Any = case.allowed(0, 0)[:, case.sizes["kv_len"] // keys * keys :].all(1)
    return any(block.all() for block in np.split(sees_all, range(rows, len(sees_all), rows)))


def _reads_around_infinities(plan: Plan) -> bool:
    """Whether kernels skip numbers that are not finite, one by one, where a weight is 0."""
    spec = plan.facts.spec
    usual = spec.normalize == "softmax" and spec.dropout is None
    return "v" in plan.wanted and usual and _tiled(plan) and not plan.schedule.is_warp_specialized


INFINITE_DOUT = Circumstance(
    "infinite_dout",
    "a row of dO that is not finite, with more than 8 keys, all of whose weights are not 0, and rows after it",
    _reads_around_infinities,
    lambda case: case.spoils == "dout" and _has_weights(case),
    by_values=True,
)


def _has_weights(case: Case) -> bool:
    """Whether the row in the middle has more than 8 keys, and no key's weight is 0 in 16 bits."""
    if case.is_empty:
        return False
    middle = case.sizes["q_len"] // 2
    scores = case.first_scores[middle]
    finite = scores[np.isfinite(scores)]
    return (
        finite.size > 8
        and len(finite) == int(case.allowed(0, 0)[middle].sum())
        and float(finite.max() - finite.min()) < MOST_APART
    )


def _clears_rows(plan: Plan) -> bool:
    """Whether kernels keep rows and keys that are not finite from the products of tiles, where the mask excludes pairs."""
    spec = plan.facts.spec
    usual = spec.normalize in ("softmax", "sigmoid") and spec.dropout is None
    return _persistent(plan) and _masked(plan) and usual and {*QKV} <= {*plan.wanted}


SPOILED_DOUT = Circumstance(
    "row_of_dout_of_nan",
    "a row of dO of NaN that sees some keys of a tile and not others",
    _clears_rows,
    lambda case: case.spoils == "row of dO" and _has_weights(case) and _spoils_some_keys(case),
    "a row sees all keys of each tile, or none",
    by_values=True,
)
SPOILED_QUERY = Circumstance(
    "row_of_q_of_nan",
    "a row of Q of NaN, one of the first 8 of 16, that sees some keys of a tile and not others",
    _clears_rows,
    lambda case: case.spoils == "row of Q" and _spoils_some_keys(case) and _spoils_a_first_row(case),
    "a row sees all keys of each tile, or none",
    by_values=True,
)
SPOILED_KEY = Circumstance(
    "row_of_k_of_nan",
    "a key of NaN, in a tile before the last one, that some rows of a block see and others do not",
    _clears_rows,
    lambda case: case.spoils == "row of K" and _spoils_inside(case),
    "all rows of a block see a key, or none does",
    by_values=True,
)


def _spoils_some_keys(case: Case) -> bool:
    row = spoiled_row(case.sizes["q_len"])
    return not case.is_empty and _is_mixed(case.allowed(0, 0, slice(row, row + 1))[0], case.tile[1])


def _spoils_a_first_row(case: Case) -> bool:
    """Whether the row in the middle is one of the first 8 of 16, and has no score that is not NaN."""
    row = spoiled_row(case.sizes["q_len"])
    return row % 16 < 8 and bool(np.isnan(case.first_scores[row][case.allowed(0, 0, slice(row, row + 1))[0]]).all())


def _spoils_inside(case: Case) -> bool:
    if case.is_empty:
        return False
    key = spoiled_row(case.sizes["kv_len"])
    is_before = key // case.tile[1] < (case.sizes["kv_len"] - 1) // case.tile[1]
    return is_before and _is_mixed(case.allowed(0, 0)[:, key], WARPGROUP_ROWS)


# The numbers of splits that the groups of threads of a join, and the lanes of a warp, read at once; the scores that show it
OF_SPLITS: tuple[tuple[int, FarApart | None], ...] = ((4, None), (32, "rising"))
MANY_SPLITS = tuple(splits for splits, _ in OF_SPLITS)


def _has_distant_keys(case: Case, splits: int) -> bool:
    """Whether a row of the first head has keys that lie so many splits apart, or more."""
    if case.is_empty or case.splits <= splits:
        return False
    has_keys: Any = case.of_tiles(case.allowed(0, 0), False)
    last = len(has_keys) - 1 - has_keys[::-1].argmax(0)
    return bool((has_keys.any(0) & (last - has_keys.argmax(0) >= splits * case.plan.tile.warps)).any())


JOINED = (
    *(
        Circumstance(
            f"more_splits_than_{splits}",
            f"a row whose keys lie in more than {splits} splits",
            _decode,
            lambda case, splits=splits: _has_distant_keys(case, splits),  # type: ignore[misc]
            "rows have keys in fewer splits",
            by_values=scores is None,
            scores=scores,
        )
        for splits, scores in OF_SPLITS
    ),
    Circumstance(
        "joined_splits",
        "a row whose keys lie in several splits, which are joined",
        _decode,
        lambda case: bool(_joined_rows(case).any()),
        by_values=True,
    ),
    Circumstance(
        "joined_without_keys",
        "a row without keys, of several splits",
        lambda plan: _decode(plan) and (_masked(plan) or has_sequences(plan)),
        _joins_nothing,
        "each row of several splits has a key",
        by_values=True,
    ),
    Circumstance(
        "joined_large_scores",
        "a row whose keys lie in several splits, and whose weights would overflow if its maximum were not subtracted",
        lambda plan: _decode(plan) and rescales(plan),
        _joins_large,
        scores="steep",
    ),
)

TABLE: tuple[Circumstance, ...] = (
    *(*SIZES, *SEQUENCES, *ROWS_AND_KEYS, *CLASSES.values()),
    *(*OF_ROWS, *OF_KEYS, *IN_A_TILE, *CLASSIFIED, *OWN, *LAYOUTS),
    *(RISES, OVERFLOWS, HUGE, HUGE_BELOW, STAYS_HUGE, LOW, NEGATIVE, POSITIVE, MIXED, FALLING, RISING, EQUAL, *JOINED),
    *SPOILED_SINKS,
    *(BEYOND_KEYS, ONE_ELEMENT, LOW_ENDS, LOW_UNFILLED, INFINITE_DOUT, SPOILED_DOUT, SPOILED_QUERY, SPOILED_KEY),
)
BY_NAME: Mapping[str, Circumstance] = {one.name: one for one in TABLE}


def wanted_circumstances(plan: Plan) -> Iterator[Circumstance]:
    """Those that a check of `plan` should have."""
    return (one for one in TABLE if one.applies(plan))


def wrong_pairs(case: Case, allowed: Mapping[tuple[int, int], Any]) -> Iterator[tuple[str, tuple[int, int], Any]]:
    """The changes of the plan's bounds that are wrong on a problem, each with a head (b, h) and the pairs [q_len, kv_len] that
    its kernel computes there: a tile with an allowed pair is skipped, or one with a forbidden pair counts as full. `allowed` is
    the mask [q_len, kv_len] of some heads.
    """
    keys, q_len, kv_len = case.tile[1], case.sizes["q_len"], case.sizes["kv_len"]

    def pairs_of(kinds: Any, mask: Any) -> Any:
        each = np.repeat(np.repeat(kinds, case.rows_of_tile, 0), keys, 1)[:q_len, :kv_len]
        return (each == FULL) | (each == PARTIAL) & mask

    for what, bounds in changed_bounds(case.plan.bounds):
        inside = {name: maximum(ZERO, minimum(KEYS.length, getattr(bounds, name))) for name in ("begin", "end")}
        moved = replace(bounds, **inside)  # type: ignore[arg-type]
        for (b, h), mask in allowed.items():
            try:
                kinds = case.kinds(b, h, moved)
            except IndexError:  # it reads another tile than there are
                continue
            if ((computed := pairs_of(kinds, mask)) != mask).any():
                yield what, (b, h), computed
    for (b, h), mask in allowed.items():
        for axis, other in (("batch", (0, h)), ("head", (b, 0))):
            if other != (b, h) and ((computed := pairs_of(case.kinds(*other), mask)) != mask).any():
                yield f"those of the first {axis}", (b, h), computed


CLOSED_FORMS = ("begin", "end", "full_begin", "full_end")


def changed_bounds(bounds: MaskBounds) -> Iterator[tuple[str, MaskBounds]]:
    """Each bound as one of its operands, one more and one less, and at the ends of the keys; tests per tile always true, or
    without an operand."""
    for name in CLOSED_FORMS:
        form = getattr(bounds, name)
        if form is None:
            continue
        others = [*_operands(form), add(form, constant(1)), add(form, constant(-1)), ZERO, KEYS.length]
        for other in dict.fromkeys(others):
            if other is not form:
                yield f"{name} as {other}", replace(bounds, **{name: other})  # type: ignore[arg-type]
    if bounds.per_tile:
        for name, value in (("may", FALSE), ("must", TRUE)):
            yield f"{name} always {value}", replace(bounds, **{name: value})  # type: ignore[arg-type]
        for name in ("may", "must"):
            for other in dict.fromkeys(_operands(getattr(bounds, name), ("and", "or", "min", "max"))):
                yield f"{name} as {other}", replace(bounds, **{name: other})  # type: ignore[arg-type]


def _operands(form: Expr, of: Container[str] | None = None) -> Iterator[Expr]:
    """`form` with one of its operators, or one of those `of` these names, replaced by an operand."""
    for node in walk(form):
        if isinstance(node, Apply) and (of is None or node.op in of):
            for operand in node.args:
                if operand.type is node.type:
                    swapped: dict[Expr, Expr] = {node: operand}
                    yield rewrite(form, lambda n, swapped=swapped: swapped.get(n))  # type: ignore[misc]
