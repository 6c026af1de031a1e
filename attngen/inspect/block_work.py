"""A problem of a kernel, and what the kernel's blocks do there: the tiles that each block visits, evaluated on numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attngen.inspect.blocks import held_by, tile_of, visits_keys, visits_rows
from attngen.inspect.trial import Setting, Trial
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY, FULL, PARTIAL, classify_tiles
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.definition import Problem, allowed_rows, score_rows
from attngen.reference.numpy_oracle import numbers_of
from attngen.reference.problems import Array, Sample
from attngen.reference.stored import PAGE_SIZE
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import from_storage

MOST_TILES = 8192  # at most so many are classified one by one
MOST_PAIRS = 2**18  # at most so many have their score computed and their mask evaluated
MOST_HEADS = 4  # up to so many, tiles of all are classified; with more, those of the first and the last
MULTIPROCESSORS = 2  # on the emulated device, if a problem states no number


@dataclass(frozen=True, eq=False)
class Block:
    """A block of rows, or a block of keys, and what it does with tiles."""

    kinds: Array  # kinds of all tiles of keys, in order; or of all tiles of rows, of each query head that shares the keys
    parts: tuple[Array, ...] = ()  # the same for the consumers that have a range of tiles of their own

    @cached_property
    def visited(self) -> tuple[int, ...]:
        """The tiles that are not skipped."""
        return tuple(np.flatnonzero(self.kinds != EMPTY).tolist())

    @property
    def first(self) -> int:
        """The kind of the first tile that is visited; EMPTY if there is none."""
        return int(self.kinds[self.visited[0]]) if self.visited else EMPTY

    @property
    def last(self) -> int:
        return int(self.kinds[self.visited[-1]]) if self.visited else EMPTY

    @property
    def skips_between(self) -> bool:
        """Whether a tile is skipped between two that are visited."""
        return bool(self.visited) and self.visited[-1] - self.visited[0] >= len(self.visited)


@dataclass(frozen=True, eq=False)
class Case:
    """A trial with its values, for a plan."""

    spec: AttentionSpec
    plan: Plan
    trial: Trial
    problem: Sample

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return self.trial.shape.sizes(self.spec)

    @property
    def params(self) -> Mapping[str, int | float]:
        return self.trial.params

    @property
    def setting(self) -> Setting:
        return self.trial.setting

    @cached_property
    def tile(self) -> tuple[int, int]:
        return tile_of(self.plan)

    @property
    def batch(self) -> int:
        return self.sizes["batch"]

    @property
    def q_len(self) -> int:
        return self.sizes["q_len"]

    @property
    def kv_len(self) -> int:
        return self.sizes["kv_len"]

    @property
    def page_size(self) -> int:
        return self.setting.page_size or PAGE_SIZE

    @cached_property
    def _inputs(self) -> dict[str, Array]:
        return {name: from_storage(array) for name, array in self.problem.inputs.items()}

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair of a row and a key."""
        return 0 in (self.sizes[name] for name in ("batch", "q_heads", "q_len", "kv_len"))

    @property
    def group_size(self) -> int:
        return self.sizes["q_heads"] // max(self.sizes["kv_heads"], 1)

    @property
    def rows_of_tile(self) -> int:
        """Query rows that visit the same tiles: those of a consumer, if it has a range of its own; of a block that packs the
        rows of several heads, as many as it has of each."""
        rows = min(self.tile[0], self.plan.tile_rows)
        return max(rows // self.group_size, 1) if self.plan.schedule.packs_heads else rows

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The heads (b, h) that are looked at."""
        batch, heads = self.batch, self.sizes["q_heads"]
        every = [(b, h) for b in range(batch) for h in range(heads)]
        return tuple(every) if len(every) <= MOST_HEADS else tuple(dict.fromkeys(((0, 0), (batch - 1, 0), every[-1])))

    @property
    def is_large(self) -> bool:
        """Whether there are too many tiles to be classified one by one."""
        return self.q_len // self.tile[0] * (self.kv_len // self.tile[1]) > MOST_TILES

    # --- tiles

    def kinds(self, b: int, h: int, bounds: MaskBounds | None = None) -> Array:
        """The kinds of the tiles of one head, by the plan's bounds or by others: [blocks of rows, tiles of keys]."""
        return self._classified(bounds or self.plan.bounds, (self.rows_of_tile, self.tile[1]), b, h)

    def _classified(self, bounds: MaskBounds, tile: tuple[int, int], b: int, h: int) -> Array:
        names = {**self.sizes, **self.params, "b": b, "h": h}
        with np.errstate(all="ignore"):
            of_ranges = self.plan.block_q if self.plan.schedule.packs_heads else 0
            return classify_tiles(bounds, *tile, names, self._inputs, of_ranges=of_ranges)

    @cached_property
    def row_blocks(self) -> tuple[Block, ...]:
        """The blocks of rows that visit tiles of keys, of `heads`; none if no kernel has such blocks."""
        if self.is_empty or self.is_large or not visits_keys(self.plan):
            return ()
        return tuple(self._packed_blocks() if self.plan.schedule.packs_heads else self._blocks_of_rows())

    def _blocks_of_rows(self) -> Iterator[Block]:
        plan = self.plan
        held, _ = held_by(plan)
        rows = plan.consumer_rows or held
        for b, h in self.heads:
            kinds = self._classified(plan.bounds, (rows, plan.block_kv), b, h)
            if not plan.consumer_rows:
                yield from (Block(of_block) for of_block in kinds)
                continue
            missing = plan.missing_rows(self.q_len) // rows
            whole = np.concatenate([np.full((missing, kinds.shape[1]), EMPTY, kinds.dtype), kinds])
            for first in range(0, len(whole), held // rows):
                consumers = whole[first : first + held // rows]
                yield Block(consumers.max(0), tuple(consumers))

    def _packed_blocks(self) -> Iterator[Block]:
        """Of `decode`: the rows of all query heads that share keys are numbered together."""
        group, rows = self.group_size, self.plan.block_q
        for b, first_head in dict.fromkeys((b, h // group * group) for b, h in self.heads):
            heads = [self._classified(self.plan.bounds, (1, self.plan.block_kv), b, first_head + g) for g in range(group)]
            packed = np.stack(heads, 1).reshape(-1, heads[0].shape[1])  # row q * group + g
            for first in range(0, len(packed), rows):
                of_block = packed[first : first + rows]
                kinds = np.where((of_block == FULL).all(0), FULL, np.where((of_block != EMPTY).any(0), PARTIAL, EMPTY))
                if not self.plan.bounds.per_tile and (visited := np.flatnonzero(kinds)).size:  # one range for all rows
                    kinds[visited[0] : visited[-1] + 1] = np.maximum(kinds[visited[0] : visited[-1] + 1], PARTIAL)
                yield Block(kinds)

    @cached_property
    def key_blocks(self) -> tuple[Block, ...]:
        """The blocks of keys that visit tiles of rows, of the groups of `heads`; none if no kernel has such blocks."""
        plan, group = self.plan, self.group_size
        if self.is_empty or self.is_large or not visits_rows(plan):
            return ()
        assert plan.row_bounds is not None
        _, held = held_by(plan)
        found = []
        for b, first_head in dict.fromkeys((b, h // group * group) for b, h in self.heads):
            heads = [self._classified(plan.row_bounds, (plan.block_q, held), b, first_head + g) for g in range(group)]
            found += [Block(of_block) for of_block in np.concatenate(heads, 1)]
        return tuple(found)

    @property
    def works(self) -> int:
        """The work tiles of the kernel of a persistent schedule that has the fewest; of others, the rows of all heads."""
        if not self.plan.schedule.is_warp_specialized or not (self.kv_len or visits_keys(self.plan)):
            return self.batch * self.sizes["q_heads"] * self.q_len
        heads, kv_heads = (self.batch * self.sizes[name] for name in ("q_heads", "kv_heads"))
        q_len, kv_len = self.q_len, self.kv_len
        if not self.plan.wanted:
            return int(heads * -(-q_len // self.plan.block_q))
        rows, keys = held_by(self.plan)
        of_keys = [kv_heads * self.parts * -(-kv_len // keys)] if visits_rows(self.plan) else []
        of_rows = [heads * -(-q_len // rows)] if visits_keys(self.plan) else []
        return int(min((*(of_keys if kv_len else ()), *of_rows), default=0))

    @property
    def processors(self) -> int:
        """The multiprocessors of the emulated device."""
        return self.setting.multiprocessors or MULTIPROCESSORS

    @property
    def parts(self) -> int:
        """Over how many work tiles the query heads of a group are divided; 1 if the plan does not divide them."""
        rule = self.plan.own.parts
        return 1 if rule is None else int(rule({**self.sizes, "multiprocessors": self.processors}))

    @property
    def splits(self) -> int:
        """The number of blocks over which the keys of a row are split."""
        rule = self.plan.own.splits
        return 1 if rule is None else int(rule({**self.sizes, "multiprocessors": self.processors}))

    def tiles_of_warps(self, block: Block) -> Array:
        """How many tiles the warps with tiles of their own visit, of each split of a block of `decode`: [splits, warps]."""
        splits, warps = self.splits, self.plan.own.key_warps
        found = np.zeros(splits * warps, int)
        if block.visited:
            for tile in block.visited:
                found[(tile - block.visited[0]) % len(found)] += 1
        return found.reshape(splits, warps)

    # --- pairs

    @cached_property
    def numbers(self) -> Problem:
        return numbers_of(self.spec, self.problem, self.params, np.float32)

    def allowed(self, b: int, h: int, rows: slice | None = None) -> Array:
        """The pairs that the mask allows in a head: [rows, keys]."""
        rows = rows or slice(0, self.q_len)
        every = np.ones((len(range(*rows.indices(self.q_len))), self.kv_len), bool)
        if self.spec.mask is None or not every.size:
            return every
        with np.errstate(all="ignore"):
            found: Array = every & np.asarray(allowed_rows(self.numbers, b, h, rows))
            return found

    @cached_property
    def row_maxima(self) -> Array:
        """The largest score of each of the first rows of the first head; -inf of a row without keys."""
        found: Array = self.first_scores.max(1, initial=-np.inf)
        return found

    @cached_property
    def pairs(self) -> tuple[Array, ...]:
        """`allowed` of each of `heads`; none of a large problem."""
        if self.q_len * self.kv_len > MOST_PAIRS:
            return ()
        return tuple(self.allowed(b, h) for b, h in self.heads)

    @cached_property
    def first_scores(self) -> Array:
        """The scores of the first rows of the first head, -inf where the mask forbids the pair: [rows, keys]."""
        rows = slice(0, min(self.q_len, MOST_PAIRS // max(self.kv_len, 1)))
        with np.errstate(all="ignore"):
            scores = np.asarray(score_rows(self.numbers, 0, 0, rows))
            return np.where(self.allowed(0, 0, rows), scores, -np.inf)

    def of_tiles(self, numbers: Array, least: float) -> Array:
        """The largest of each row's numbers in each tile of keys, [tiles, rows], of [rows, keys]."""
        starts = range(0, numbers.shape[1], self.tile[1])
        return np.array([numbers[:, i : i + self.tile[1]].max(1, initial=least) for i in starts])


def seconds(case: Case) -> float:
    """About how long the emulated device takes for a problem."""
    sizes, area = case.sizes, case.tile[0] * case.tile[1]
    if case.is_empty:
        return 0.0
    pairs, heads = sizes["q_len"] * sizes["kv_len"], sizes["q_heads"]
    if case.plan.schedule.is_tiled and not case.is_large:
        pairs = int((case.kinds(0, 0) != EMPTY).sum()) * area
        if case.plan.schedule.packs_heads:  # a block has rows of all heads of a group, or of a part of them
            heads = sizes["kv_heads"] * -(-case.group_size // case.tile[0])
    columns = case.spec.head_dim + case.spec.head_dim_v
    return sizes["batch"] * heads * pairs * columns * case.plan.schedule.emulated_ns * 1e-9
