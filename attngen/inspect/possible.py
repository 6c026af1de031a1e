"""The problems of a spec that a call accepts, and others like them: with other params, captured tensors and scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from attngen.diagnostics import ArgumentError
from attngen.inspect.blocks import tile_of
from attngen.inspect.circumstances.row import Scores
from attngen.inspect.prepare import check_call
from attngen.inspect.trial import Fixed, Setting, Trial
from attngen.plan import Plan
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.problems import Draw, Shape
from attngen.reference.problems import Scores as FarApart
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const, Name, Type, walk

STEEP = (64.0, 8.0)  # times Q: maxima then differ from tile to tile, and exponents of scores overflow
FAR_APART: tuple[FarApart, ...] = get_args(FarApart)
LONGEST = 4096  # largest constant in a mask or score that lengths are chosen to reach
EXTREMES = ("least", "largest", "beyond")  # integers of captured tensors
AROUND = range(-2, 3)  # distances of lengths from those at which a bound lies at the edge of a tile


class Possible:
    """Problems for a plan, as far as `fixed` leaves them open. `refusal` is the first error of a call that was refused."""

    def __init__(self, spec: AttentionSpec, plan: Plan, fixed: Fixed) -> None:
        self.spec, self.plan, self.fixed = spec, plan, fixed
        self.tile = tile_of(plan)
        self.params: dict[str, int | float] = {p.name: p.default for p in spec.params if p.default is not None}
        self.params |= fixed.params
        self.has_booleans = any(i.dtype.kind == "bool" for i in spec.inputs)  # drawn by the tile: other problems are shared
        self.refusal: Exception | None = None

    def of_shape(self, shape: Shape) -> Trial | None:
        """A problem of that shape; None if every call of it is refused."""
        for params in (self.params, *self._other_params(shape)):
            try:
                sized = with_free_sizes(self.spec, shape, params)
                check_call(self.spec, sized, params)
            except ArgumentError as error:  # and ObligationError
                self.refusal = self.refusal or error
                continue
            draw = Draw(tile=self.tile if self.has_booleans else None)
            sections = self.plan.heads_in_l2 is not None and sized.batch > 1
            return Trial(sized, params, self.fixed.seed, Setting(draw, sections=sections))
        return None

    def shape(self, batch: int, q_len: int, kv_len: int) -> Shape:
        """One head; with several batches, or if it is the only problem, groups of two heads."""
        fixed = self.fixed
        alone = batch == 1 and not fixed.has_lengths
        heads = fixed.heads or fixed.kv_heads or (1 if alone else 2 * batch)
        kv_heads = fixed.kv_heads or (heads // 2 if heads % 2 == 0 and fixed.heads is None else heads)
        batch = batch if fixed.batch is None else fixed.batch
        return Shape(batch, heads, kv_heads, q_len, kv_len, dict(fixed.free))

    def with_sizes(self, trial: Trial) -> Trial | None:
        """`trial` with free sizes for its params, if its call is not refused."""
        shape = with_free_sizes(self.spec, replace(trial.shape, free=dict(self.fixed.free)), trial.params)
        one = replace(trial, shape=shape)
        return one if self.is_call(one) else None

    def is_call(self, trial: Trial) -> bool:
        try:
            check_call(self.spec, trial.shape, trial.params)
        except ArgumentError:  # and ObligationError
            return False
        return True

    def by_params(self, trial: Trial) -> Iterator[Trial]:
        for params in self._other_params(trial.shape):
            yield replace(trial, params=params)

    def _other_params(self, shape: Shape) -> Iterator[dict[str, int | float]]:
        """Values near parts of the lengths for integers, fractions and multiples of the default for floats."""
        open_params = [p for p in self.spec.params if p.name not in self.fixed.params and p.default is not None]
        length, (_, keys) = max(shape.q_len, shape.kv_len), self.tile
        integers = (length // 3, keys + 2, keys, max(length - 1, 1), 3, 2, 1)
        factors = (0.5, 0.125, 8.0)
        for i in range(len(integers) if open_params else 0):
            chosen: dict[str, int | float] = {}
            for position, p in enumerate(open_params):
                assert p.default is not None
                if p.type is Type.INT:
                    chosen[p.name] = integers[(i + position) % len(integers)]
                else:
                    chosen[p.name] = (p.default or 1.0) * factors[(i + position) % len(factors)]
            yield {**self.params, **chosen}

    def by_integers(self, trial: Trial) -> Iterator[Trial]:
        if any(i.dtype.kind == "int" for i in self.spec.inputs):
            for step in range(4):
                for integers in ("two documents", "positions"):
                    yield replace(trial.drawn(integers=integers), seed=self.fixed.seed + step)

    def by_extremes(self, trial: Trial) -> Iterator[Trial]:
        if any(i.dtype.kind != "float" for i in self.spec.inputs):
            for integers in EXTREMES:
                yield trial.drawn(integers=integers, hides_rows=True)

    def by_magnitude(self, trial: Trial) -> Iterator[Trial]:
        for magnitude in (8.0, 64.0):
            yield trial.drawn(magnitude=magnitude)

    def by_seed(self, trial: Trial) -> Iterator[Trial]:
        if self.spec.inputs:
            for step in range(1, 5):
                yield replace(trial, seed=self.fixed.seed + step)

    def steep(self, usual: Trial) -> Iterator[tuple[Scores, Trial]]:
        for magnitude in STEEP:
            yield "steep", usual.drawn(magnitude=magnitude, integers="two documents")
            yield "steep", usual.drawn(magnitude=magnitude, integers="one document")
        for scores in FAR_APART:
            yield scores, usual.drawn(integers="one document", scores=scores)

    def at_edges(self, trial: Trial) -> Iterator[Trial]:
        """Problems like `trial` whose bounds may lie at other edges of tiles: of other values first, then of other lengths."""
        yield from (*self.by_params(trial), *self._by_params_of_longer(), *self.by_integers(trial), *self._by_blocks())
        yield from (*self._by_lengths(), *self._by_batches())

    def _by_params_of_longer(self) -> Iterator[Trial]:
        """The same with several blocks of rows and tiles of keys, so that a window begins and ends anywhere in a tile."""
        longer = 3 * max(self.tile) + 1
        if (usual := self.of_shape(self.shape(1, longer, longer))) is not None:
            yield from self.by_params(usual)

    def _by_lengths(self) -> Iterator[Trial]:
        """Problems whose bounds of tiles lie at the edges of tiles: one length exceeds the other by about a tile, if the mask
        reads lengths; and the last row is about a number of tiles from a constant of the mask."""
        nodes = [] if self.spec.mask is None else [*walk(self.spec.mask)]
        rows, keys = self.tile
        lengths = []
        if {"q_len", "kv_len"} & {node.name for node in nodes if isinstance(node, Name)}:
            least = rows + 1
            lengths += [pair for n in AROUND for pair in ((least, least + keys + n), (least + keys + n, least))]
        for constant in {abs(int(node.value)) for node in nodes if isinstance(node, Const) and node.type is Type.INT}:
            least = max(rows, min(constant, LONGEST)) + 2
            lengths += [(least + (constant + n - least) % keys,) * 2 for n in AROUND]
        for one in dict.fromkeys(lengths):
            if (trial := self.of_shape(self.shape(1, *one))) is not None:
                yield trial

    def _by_batches(self) -> Iterator[Trial]:
        """Two batches whose captured integers differ, so that a tile is visited in one of them alone."""
        if all(i.dtype.kind != "int" or "batch" not in i.dims for i in self.spec.inputs):
            return
        rows, keys = self.tile
        if (usual := self.of_shape(self.shape(2, rows + 1, 2 * keys + 1))) is not None:
            for integers in EXTREMES:
                yield usual.drawn(integers=integers)

    def _by_blocks(self) -> Iterator[Trial]:
        """Documents that end where tiles end, and others."""
        if not self.plan.bounds.per_tile or all(i.dtype.kind != "int" for i in self.spec.inputs):
            return
        (rows, keys), length = self.tile, 2 * max(self.tile)
        if (usual := self.of_shape(self.shape(1, length, length))) is None:
            return
        for (block, less), sign in product(((keys, 0), (rows, 0), (rows, keys)), (1, -1)):
            yield usual.drawn(blocks=(sign * block, less))
