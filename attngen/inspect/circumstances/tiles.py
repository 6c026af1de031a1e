"""Which rows have keys, and which tiles a block visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attngen.inspect.block_work import Block, Case
from attngen.inspect.circumstances.row import AXES, Axis, Circumstance, backward, is_mixed, masked, tiled
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY, FULL, PARTIAL

ROWS_AND_KEYS = (
    Circumstance("row_without_keys", "a row without keys", (masked,),
        lambda case: any(not pairs.any(1).all() for pairs in case.pairs), "each row has a key", by_values=True),
    Circumstance("block_of_both_rows", "a block of which some rows have keys and others have none", (masked,),
        lambda case: any(is_mixed(pairs.any(1), case.tile[0]) for pairs in case.pairs),
        "all rows of a block have keys, or none has", by_values=True),
    Circumstance("key_without_rows", "a key that no row sees", (masked, backward),
        lambda case: any(not pairs.any(0).all() for pairs in case.pairs), "each key is seen by a row", by_values=True),
    Circumstance("tile_of_both_keys", "a tile of which a row sees some keys, and no row sees others", (masked, tiled, backward),
        lambda case: any(is_mixed(pairs.any(0), case.tile[1]) for pairs in case.pairs),
        "all keys of a tile are seen, or none is", by_values=True),
)  # fmt: skip


def _has_kind(case: Case, kind: int) -> bool:
    """Of large problems each class is taken to occur."""
    return case.is_large or any(bool((case.kinds(b, h) == kind).any()) for b, h in case.heads)


CLASSES = tuple(
    Circumstance(
        f"{name}_tile",
        f"a tile {what}",
        (tiled,) if kind == FULL else (tiled, masked),
        lambda case, kind=kind: _has_kind(case, kind),  # type: ignore[misc]
        absent,
        by_values=True,
    )
    for kind, name, what, absent in (
        (EMPTY, "skipped", "that is skipped: the mask forbids all of its pairs", "no tile can be skipped"),
        (PARTIAL, "partial", "of which the mask allows some pairs", "each tile is skipped or full"),
        (FULL, "full", "of which the mask allows all pairs", "no tile is full"),
    )
)

# What can happen to a block: a name, the words about it and about masks with which it cannot, whether it takes a mask, a test
OF_A_BLOCK: tuple[tuple[str, str, str, bool, Callable[[Block], bool]], ...] = (
    ("no_tile", "{block} that visits no tile of {tiles}", "{block} always has {tiles}", True, lambda of: not of.visited),
    ("one_tile", "{block} that visits one tile of {tiles} alone", "", False, lambda of: len(of.visited) == 1),
    ("several_tiles", "{block} that visits several tiles of {tiles}", "", False, lambda of: len(of.visited) > 1),
    ("first_partial", "{block} whose first tile of {tiles} is partial, and a later one full",
        "the first tile of {block} is full, or none is", True,
        lambda of: of.first == PARTIAL and bool((of.kinds == FULL).any())),
    ("last_partial", "{block} whose last tile of {tiles} is partial, and an earlier one full",
        "the last tile of {block} is full, or none is", True,
        lambda of: of.last == PARTIAL and bool((of.kinds == FULL).any())),
    ("all_full", "{block} all of whose tiles of {tiles} are full", "{block} has a tile that is partial", False,
        lambda of: bool(of.visited) and bool((of.kinds[list(of.visited)] == FULL).all())),
    ("later_first", "{block} that skips the first tile of {tiles}", "{block} visits the first tile", True,
        lambda of: bool(of.visited) and of.visited[0] > 0),
    ("earlier_last", "{block} that skips the last tile of {tiles}", "{block} visits the last tile", True,
        lambda of: bool(of.visited) and of.visited[-1] < len(of.kinds) - 1),
    ("skips_between", "{block} that skips a tile of {tiles} between two that it visits",
        "all tiles from the first to the last are visited", True, lambda of: of.skips_between),
)  # fmt: skip


def _of_blocks(axis: Axis) -> Iterator[Circumstance]:
    for name, what, absent, takes_mask, test in OF_A_BLOCK:
        yield Circumstance(
            f"{axis.held}_{name}",
            what.format(**axis.words),
            (axis.visits, masked) if takes_mask else (axis.visits,),
            lambda case, test=test: any(map(test, axis.blocks(case))),  # type: ignore[misc]
            absent.format(**axis.words),
            by_values=True,
        )
    yield Circumstance(
        f"{axis.held}_stages_again",
        f"each buffer of a tile of {axis.seen} filled again, by the same block or warp",
        (axis.visits,),
        lambda case: _fills(case, axis.blocks(case)) >= fills_of(case.plan) * case.plan.stages,
        f"a block of {axis.held} visits too few tiles",
        by_values=True,
    )


def fills_of(plan: Plan) -> int:
    """How many times each stage of a ring is to be filled: twice; three times if mbarriers guard it, which have two phases."""
    return 3 if plan.schedule.by_tma or plan.own.copies == "tma" else 2


def _fills(case: Case, blocks: tuple[Block, ...]) -> int:
    """The tiles that pass through one ring of stages, at most. On the emulated device the first block of a persistent kernel
    takes all work tiles but the first of each other block."""
    if case.plan.schedule.packs_heads:
        return max((int(case.tiles_of_warps(block).max()) for block in blocks), default=0)
    if not case.plan.schedule.is_warp_specialized:
        return max((len(block.visited) for block in blocks), default=0)
    visits = sorted(len(block.visited) for block in blocks)
    return sum(visits[: max(len(visits) - case.processors + 1, 0)])


OF_BLOCKS = tuple(one for axis in AXES for one in _of_blocks(axis))
