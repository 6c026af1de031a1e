"""What can happen because of how a schedule works: lists and words of tiles, queues of work tiles, keys split over blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from attngen.inspect.block_work import Block, Case
from attngen.inspect.blocks import held_by, visits_keys
from attngen.inspect.circumstances.row import (
    AXES,
    FEW_ROWS,
    Circumstance,
    backward,
    forward,
    has_sequences,
    masked,
    persistent,
    rescales,
    splits_keys,
    subtracts_maxima,
)
from attngen.inspect.circumstances.values import OVERFLOW
from attngen.inspect.trial import spoiled_row
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.problems import Array, Scores

OF_WORD = 32  # tiles, whose kinds are the bits of a word
ROUND = 4  # elements of a row that a thread reads at once, at most
SMALL = 64  # rows of a tile, and columns: a problem of many such tiles takes a second or two

# --- ranges of captured integers in a tile


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
    return any(axis.visits(plan) and (bounds := axis.bounds(plan)) is not None and bool(bounds.spans) for axis in AXES)


IN_A_TILE = tuple(
    Circumstance(
        f"{word}_at_end" if at_end else f"{word}_in_first_half",
        f"a captured vector that {word}s once, {where} of a tile, and a later block of its last number alone",
        (reads_ranges,),
        lambda case, word=word, at_end=at_end: _changes_in_a_tile(case, word == "rise", at_end),  # type: ignore[misc]
        "no range of a tile is of integers along a sequence",
    )
    for at_end, where in ((False, "in the first half"), (True, "at the last element"))
    for word in ("rise", "fall")
)

# --- tiles that are classified one by one


def classifies_together(plan: Plan, bounds: MaskBounds | None) -> bool:
    """Whether the threads of a block classify as many tiles at once by these bounds, one each."""
    schedule = plan.schedule
    together = schedule.on_tensor_cores and not (schedule.by_tma or schedule.packs_heads)
    return together and bounds is not None and bounds.per_tile


CLASSIFIED = tuple(
    Circumstance(
        f"{axis.held}_classified_again",
        f"a block of {axis.held} that visits {tile} after those that its threads classify at once",
        (axis.visits, lambda plan, axis=axis: classifies_together(plan, axis.bounds(plan))),  # type: ignore[misc]
        lambda case, axis=axis: any(  # type: ignore[misc]
            of.visited and of.visited[-1] >= case.plan.threads for of in axis.blocks(case)
        ),
        "rows and keys are too few in all of them",
        by_values=True,
    )
    for axis, tile in zip(AXES, ("a tile", "a tile of rows"), strict=True)
)


def classifies(plan: Plan) -> bool:
    return plan.bounds.per_tile or (plan.row_bounds is not None and plan.row_bounds.per_tile)


def _reads_a_second_word(block: Block) -> bool:
    visited = {*block.visited}
    return any(tile >= OF_WORD and tile % OF_WORD not in visited for tile in visited)


def _passes_a_word(block: Block) -> bool:
    """Whether none of the other tiles of a word is visited, and a later one is."""
    visited = (-1, *block.visited)
    return any((tile + 1) // OF_WORD < following // OF_WORD for tile, following in pairwise(visited))


WORDS = (
    Circumstance("empty_word",
        "a block of rows that visits none of 32 tiles of keys, or none of the rest of 32, and a later one",
        (lambda plan: plan.bounds.per_tile, visits_keys, forward), lambda case: any(map(_passes_a_word, case.row_blocks)),
        "each block visits a tile of each 32, or none after them"),
    Circumstance("second_word", "a block that visits a tile after the first 32, and skips the tile with its place among these",
        (backward, lambda plan: plan.schedule.on_tensor_cores, classifies),
        lambda case: any(map(_reads_a_second_word, (*case.row_blocks, *case.key_blocks))),
        "each block visits the same tiles of each 32"),
    Circumstance("several_rounds", "a block of few rows, one with a key after those that its threads read at once",
        (lambda plan: not plan.schedule.is_fused,),  # many rows of so many keys take long
        lambda case: case.q_len < FEW_ROWS and bool(case.allowed(0, 0)[:, ROUND * case.plan.threads :].any()),
        "a few rows have no key so far to the right"),
)  # fmt: skip

# --- work tiles of persistent blocks


def _has_consumers(plan: Plan) -> bool:
    return bool(plan.consumer_rows)


def _of_one_processor(case: Case, test: Callable[[tuple[Block, ...]], bool]) -> bool:
    """Whether the one block of a kernel has work tiles with tiles, of which all together `test` is true."""
    every = (case.row_blocks, case.key_blocks)
    return case.processors == 1 and any(any(of.visited for of in blocks) and test(blocks) for blocks in every)


def _lists_tiles(plan: Plan) -> bool:
    """Whether producers have lists of tiles, and a problem with more of them takes a second or two: with several heads, wider
    rows or larger tiles it takes longer, and the code of a list is the same."""
    spec = plan.facts.spec
    is_small = spec.q_heads is None and max(spec.head_dim, spec.head_dim_v, plan.block_q) <= SMALL
    return plan.schedule.listed_tiles > 0 and is_small


WORK_TILES = (
    Circumstance("second_work_tile", "a block that takes a second work tile, and a third", (persistent,),
        lambda case: case.works >= case.processors + 2),
    Circumstance("idle_processor", "fewer work tiles than multiprocessors", (persistent,),
        lambda case: case.works < case.processors),
    Circumstance("consumer_without_tiles", "a consumer without tiles, beside one that has some", (_has_consumers, masked),
        lambda case: any(of.visited and any((part == EMPTY).all() for part in of.parts) for of in case.row_blocks),
        "consumers of a block always have tiles together", by_values=True),
    Circumstance("first_rows_missing", "a first block in which a consumer has no rows", (_has_consumers,),
        lambda case: case.plan.missing_rows(case.q_len) > 0),
    Circumstance("empty_work_tile", "a block with a work tile without tiles, and others that have some", (persistent, masked),
        lambda case: _of_one_processor(case, lambda blocks: any(not of.visited for of in blocks)), "each work tile has tiles",
        by_values=True),
    Circumstance("empty_work_tiles", "a block with two work tiles without tiles, one after another, and others that have some",
        (persistent, masked),
        lambda case: _of_one_processor(case, lambda blocks: any(not a.visited and not b.visited for a, b in pairwise(blocks))),
        "no two work tiles side by side are without tiles", by_values=True),
    *(
        Circumstance(
            f"many_tiles_of_{axis.seen}",
            f"a block of {axis.held} that visits more tiles of {axis.seen} than the list of its producer holds",
            (_lists_tiles, axis.visits),
            lambda case, axis=axis: any(  # type: ignore[misc]
                len(of.visited) > case.plan.schedule.listed_tiles for of in axis.blocks(case)
            ),
            f"a block of {axis.held} visits too few tiles",
            by_values=True,
        )
        for axis in AXES
    ),
    Circumstance("sections", "several sections of heads that are numbered together, the last one with fewer heads",
        (lambda plan: plan.heads_in_l2 is not None,),
        lambda case: case.setting.sections and case.sizes["kv_heads"] * case.batch > 2 and _has_blocks(case)),
)  # fmt: skip


def _has_blocks(case: Case) -> bool:
    """Whether a head has several blocks of rows; of keys, if no block is of rows."""
    rows, keys = held_by(case.plan)
    return case.q_len > rows if visits_keys(case.plan) else case.kv_len > keys


# --- keys and heads that are divided over blocks


def _has_idle(tiles: Array) -> bool:
    return bool(tiles.any()) and not tiles.all()


def divides_groups(plan: Plan) -> bool:
    """Whether the query heads of a group may be divided over work tiles."""
    return plan.own.parts is not None


SPLITS = (
    Circumstance("one_split", "keys that one block reads", (splits_keys,), lambda case: case.splits == 1),
    Circumstance("split_without_keys", "a split without keys, beside one that has some", (splits_keys, masked),
        lambda case: case.splits > 1 and any(_has_idle(case.tiles_of_warps(b).sum(1)) for b in case.row_blocks),
        "each split has keys", by_values=True),
    Circumstance("warp_without_keys", "a warp without keys in a split that has some",
        (splits_keys, lambda plan: plan.own.key_warps > 1),
        lambda case: any(any(map(_has_idle, case.tiles_of_warps(b))) for b in case.row_blocks), by_values=True),
    Circumstance("one_part", "a group of query heads that one block adds up", (divides_groups,),
        lambda case: case.group_size > 1 and case.parts == 1),
    Circumstance("more_parts", "a group of query heads in more than two parts", (divides_groups,), lambda case: case.parts > 2,
        "groups have two query heads"),
    Circumstance("several_parts", "a group of query heads in parts, of a block each", (divides_groups,),
        lambda case: case.parts > 1),
)  # fmt: skip

# The numbers of splits that the groups of threads of a join, and the lanes of a warp, read at once; the scores that show it
OF_SPLITS: tuple[tuple[int, Scores | None], ...] = ((4, None), (32, "rising"))
MANY_SPLITS = tuple(splits for splits, _ in OF_SPLITS)


def _has_distant_keys(case: Case, splits: int) -> bool:
    """Whether a row of the first head has keys that lie so many splits apart, or more."""
    if case.splits <= splits:
        return False
    has_keys = case.of_tiles(case.allowed(0, 0), False)
    last = len(has_keys) - 1 - has_keys[::-1].argmax(0)
    return bool((has_keys.any(0) & (last - has_keys.argmax(0) >= splits * case.plan.own.key_warps)).any())


def _joined_rows(case: Case) -> Array:
    """Which rows of the first head have keys in several splits."""
    if case.splits == 1:
        return np.empty(0, bool)
    has_keys, warps = case.of_tiles(case.allowed(0, 0), False), case.plan.own.key_warps
    # The warps of a split have neighbouring tiles: these distances lead to another split, wherever the first tile is
    found: Array = np.any([(has_keys[:-n] & has_keys[n:]).any(0) for n in range(warps, warps * (case.splits - 1) + 1)], axis=0)
    return found


def _joins_large(case: Case) -> bool:
    """Whether a score of one of these rows, among those that are looked at, is larger than OVERFLOW."""
    joined = _joined_rows(case)[: len(case.row_maxima)]
    return bool((case.row_maxima[: len(joined)][joined] > OVERFLOW).any())


def _joins_nothing(case: Case) -> bool:
    """Whether keys are split, and a row has none."""
    if not all(case.sizes[name] for name in ("batch", "q_heads", "q_len")) or case.splits == 1:
        return False
    of_sequences = any(rows and not keys for rows, keys in case.setting.lengths)
    return of_sequences or not all(case.allowed(*head).any(1).all() for head in case.heads)


def _some_rows_without_keys(plan: Plan) -> bool:
    return masked(plan) or has_sequences(plan)


JOINED = (
    *(
        Circumstance(
            f"more_splits_than_{splits}",
            f"a row whose keys lie in more than {splits} splits",
            (splits_keys,),
            lambda case, splits=splits: _has_distant_keys(case, splits),  # type: ignore[misc]
            "rows have keys in fewer splits",
            by_values=scores is None,
            scores=scores,
        )
        for splits, scores in OF_SPLITS
    ),
    Circumstance("joined_splits", "a row whose keys lie in several splits, which are joined", (splits_keys,),
        lambda case: _joined_rows(case).any(), by_values=True),
    Circumstance("joined_row_of_nan", "a row of Q of NaN whose keys lie in several splits", (splits_keys, subtracts_maxima),
        lambda case: case.setting.spoils == "row of Q" and bool(_joined_rows(case)[spoiled_row(case.q_len) :][:1].any()),
        "rows in the middle have keys in one split", by_values=True),
    Circumstance("joined_without_keys", "a row without keys, of several splits", (splits_keys, _some_rows_without_keys),
        _joins_nothing, "each row of several splits has a key", by_values=True, without_pairs=True),
    Circumstance("joined_large_scores",
        "a row whose keys lie in several splits, and whose weights would overflow if its maximum were not subtracted",
        (splits_keys, rescales), _joins_large, scores="steep"),
)  # fmt: skip
