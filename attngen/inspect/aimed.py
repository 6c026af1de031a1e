"""Small problems of few heads and tiles, each aimed at something that can happen to a block (`circumstances`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from attngen.inspect.blocks import held_by, visits_keys, visits_rows
from attngen.inspect.circumstances.row import has_sequences
from attngen.inspect.circumstances.schedules import (
    MANY_SPLITS,
    OF_WORD,
    ROUND,
    classifies,
    classifies_together,
    divides_groups,
    reads_ranges,
)
from attngen.inspect.circumstances.tiles import fills_of
from attngen.inspect.circumstances.values import is_broadcast
from attngen.inspect.trial import LAYOUTS, NOTHING_SPECIAL, Setting
from attngen.plan import Plan
from attngen.plan.split_keys import PackedTiles, Splits
from attngen.reference.problems import Draw, Shape, captured_sinks
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import QKV

SPLITS = 4  # parts of a row's keys
BEYOND = 17  # rows or keys past a constant of the mask or score
FEW = 5  # rows or keys
GROUP = 4  # query heads that share keys


@dataclass(frozen=True, slots=True)
class Aim:
    """A problem's sizes and setting. `varied`: other params and captured values may help; `steep`: so may large scores."""

    shape: Shape
    setting: Setting = NOTHING_SPECIAL
    varied: bool = True
    steep: bool = False


def one_head(q_len: int, kv_len: int, setting: Setting = NOTHING_SPECIAL, varied: bool = True, steep: bool = False) -> Aim:
    return Aim(Shape(1, 1, 1, q_len, kv_len), setting, varied, steep)


def aims(spec: AttentionSpec, plan: Plan, tile: tuple[int, int], constants: Sequence[int]) -> Iterator[Aim]:
    """The cheap ones first. `tile` is rows and keys; `constants` are integers of the mask and score."""
    for lengths in ((0, FEW, FEW), (1, 0, FEW), (1, FEW, 0)):
        yield Aim(Shape(*lengths[:1], 1, 1, *lengths[1:]), varied=False)
    if plan.schedule.is_warp_specialized:
        yield one_head(3 * 128 + 1, 0, Setting(multiprocessors=1), varied=False)
    for q_len, kv_len in _lengths(plan, tile):
        yield one_head(q_len, kv_len)
    yield from _of_groups(plan, tile)
    yield from _several_batches(plan, tile)
    yield from _sequences(spec, plan, tile)
    yield from _own(spec, plan, tile)
    if plan.heads_in_l2 is not None:
        more, heads = held_by(plan)[0] + 1, (2, 4, 2) if not plan.wanted else (3, 1, 1)  # groups are in other problems
        for kv_len in (FEW, more):  # no fewer keys than rows, if a mask looks up rows among keys
            yield Aim(Shape(*heads, more, kv_len), Setting(sections=True), varied=False)
    if plan.schedule.is_tiled and not plan.schedule.on_tensor_cores:
        free = [name for name in QKV[: 2 if spec.values else 3] if name.upper() not in plan.rotated]  # those are aligned
        for layout, name in product(LAYOUTS, (*free, *(("dout",) if plan.wanted else ()))):
            several = 2 if layout == "heads" else 1
            yield Aim(Shape(1, several, several, FEW, FEW), Setting(laid_out=(name, layout)), varied=False)
    if not plan.schedule.is_tiled:
        yield one_head(2 * FEW, 4 * FEW, varied=False, steep=True)
    yield from _of_values(spec, plan, tile, constants)
    for n in (2, 4, 8, 16) if plan.schedule.packs_heads else (2, 4):
        for q_len in (n * tile[1], max(tile[1] // 4, 1), n * tile[1] + 1):
            yield one_head(q_len, n * tile[1] + 1, varied=False, steep=True)
    if (splits := plan.own.splits) is not None:
        for q_len in (FEW, 2 * splits.keys + 1):
            yield _split(spec, splits, one_head(q_len, 2 * splits.keys + 1, varied=False, steep=True))
    rows, keys = tile
    for c in constants:
        beyond = c + BEYOND
        for q_len, kv_len in ((beyond + rows, FEW), (FEW, beyond + keys), (beyond + rows, beyond + keys), (beyond, keys)):
            yield one_head(q_len, kv_len)


def _lengths(plan: Plan, tile: tuple[int, int]) -> Iterator[tuple[int, int]]:
    rows, keys = tile
    if not plan.schedule.is_fused:
        yield FEW, ROUND * plan.threads + 1  # as many rows, which a causal mask needs, would take long
    if not plan.schedule.is_tiled:
        yield from ((FEW, FEW), (FEW, 2 * rows), (2 * rows, FEW))
        return
    yield from ((FEW, keys), (rows, keys), (rows + 1, keys + 1), (FEW, 2 * keys + 1), (rows + 1, 2 * keys + 1))
    yield from ((2 * rows + 1, FEW), (rows + keys + FEW, keys + 2), (2 * rows, keys + 1), (rows, 4 * keys), (4 * rows, keys))
    if visits_keys(plan):
        filled = fills_of(plan) * plan.stages * keys * plan.own.key_warps + 1
        yield from ((FEW, filled), (rows, filled), (filled, filled))
    if visits_rows(plan):
        filled = fills_of(plan) * plan.stages * rows + 1
        yield from ((filled, FEW), (filled, keys), (filled, filled))
        yield (2 * rows + keys, 2 * rows + keys)  # no fewer keys than rows, as some masks and positions need


def _of_groups(plan: Plan, tile: tuple[int, int]) -> Iterator[Aim]:
    """Keys that several query heads share: a block of keys visits the tiles of rows of each."""
    if visits_rows(plan):
        _, held = held_by(plan)
        yield Aim(Shape(1, 2, 1, max(tile[0], held) + 1, held + 1))


def _several_batches(plan: Plan, tile: tuple[int, int]) -> Iterator[Aim]:
    """Batches whose captured numbers differ."""
    rows, keys = tile
    yield Aim(Shape(2, 1, 1, min(rows, 16) + 1, keys + 1))
    if plan.schedule.is_tiled:
        yield Aim(Shape(3, 1, 1, FEW, 3 * keys + 1))


def _sequences(spec: AttentionSpec, plan: Plan, tile: tuple[int, int]) -> Iterator[Aim]:
    """Sequences of several lengths, 0 among them, and pages of one row and of tiles."""
    kernel, (rows, keys) = spec.kernel, tile
    if not has_sequences(plan):
        return
    longest = (2 if plan.schedule.is_tiled else 1) * keys + 3
    most = max(rows, longest) + 1  # rows after the last key, which a causal mask allows each key
    of_keys, of_rows = (0, FEW, longest), (FEW, 0, most) if kernel.is_packed else (most,) * 3
    pages = (0, 1, keys, 3) if kernel.is_paged and kernel.page_size is None else (0,)
    for page_size, shift in product(pages, (0, 1)):
        lengths = tuple(zip(of_rows, (*of_keys[shift:], *of_keys[:shift]), strict=True))
        shape = Shape(3, 2, 1, most, longest)
        for wrong in (False, True) if shift == 0 and page_size in (0, 1) else (False,):
            yield Aim(shape, Setting(lengths=lengths, page_size=page_size, wrong_lengths=wrong), varied=False)


def _of_values(spec: AttentionSpec, plan: Plan, tile: tuple[int, int], constants: Sequence[int]) -> Iterator[Aim]:
    rows, keys = tile
    if is_broadcast(spec) and not plan.written_pairs:
        yield Aim(Shape(2, 4, 2, 2 * FEW, 2 * FEW), Setting(Draw(broadcast=True)), varied=False)
    if captured_sinks(spec) and not plan.wanted:
        for q_len, kv_len in ((FEW, FEW), (FEW, 0), *((constant + BEYOND, FEW) for constant in constants)):
            yield Aim(Shape(1, 4, 1, q_len, kv_len), Setting(Draw(spoils_sinks=True)), varied=False)
    if plan.wanted and plan.schedule.is_tiled:
        yield one_head(rows + 1, -(-(rows + 1) // keys) * keys)  # hidden keys in the tile of the last row
        yield one_head((-(-(keys + 1) // rows) + 1) * rows + 1, keys + 1, varied=False, steep=True)
        yield one_head(max(tile) + 1, max(tile) + 1, varied=False, steep=True)  # the last row sees the only key of a tile
        yield one_head(BEYOND, BEYOND, Setting(spoils="dout"))
    if plan.wanted and plan.schedule.is_warp_specialized:
        yield one_head(2 * BEYOND, 2 * BEYOND, Setting(spoils="row of dO"))
        yield one_head(2 * BEYOND, 2 * BEYOND, Setting(spoils="row of Q"))
        yield one_head(max(tile) + 1, max(tile) + 1, Setting(spoils="row of K"))
    if classifies(plan):
        length = (OF_WORD + 1) * max(rows, keys)
        yield one_head(length, length, Setting(Draw(blocks=(keys, 0))), varied=False)
    many = plan.threads + 1
    if visits_keys(plan) and classifies_together(plan, plan.bounds):
        yield one_head(FEW, many * keys + keys // 2)
    if visits_rows(plan) and classifies_together(plan, plan.row_bounds):
        yield one_head(many * rows + rows // 2, FEW)
    if reads_ranges(plan):  # blocks whose second one begins in the middle of a tile, before or behind that of the tile
        length = -(-2 * keys // rows) * rows + rows
        for begin, sign in product((keys + 3 * keys // 8, 2 * keys - 1), (1, -1)):  # a reduction may lose one element
            yield one_head(length, length, Setting(Draw(blocks=(sign * length, length - begin))), varied=False)


def _split(spec: AttentionSpec, rule: Splits, aim: Aim, splits: int = SPLITS) -> Aim:
    """The same on a device with so many multiprocessors that keys are split so often."""
    processors = splits * PackedTiles(rule.rows)(aim.shape.sizes(spec))
    return replace(aim, setting=replace(aim.setting, multiprocessors=processors))


def _many_tiles(plan: Plan) -> Iterator[Aim]:
    """More tiles of a block than its producer keeps in a list."""
    many_rows, many_keys = (plan.schedule.listed_tiles * n + 1 for n in (plan.block_q, plan.block_kv))
    if visits_rows(plan):
        yield one_head(many_rows, FEW, varied=False)
    if visits_keys(plan):
        yield one_head(FEW, many_keys, varied=False)
    yield one_head(many_rows, many_keys, varied=False)


def _own(spec: AttentionSpec, plan: Plan, tile: tuple[int, int]) -> Iterator[Aim]:
    """What a schedule of persistent blocks, or one that splits keys, may meet."""
    rows, keys = tile
    if (splits := plan.own.splits) is not None:
        yield one_head(FEW, splits.keys, Setting(multiprocessors=1))
        for n in (2, SPLITS):
            kv_len = n * splits.keys + 1
            for q_len in (FEW, kv_len, kv_len + BEYOND):
                yield _split(spec, splits, one_head(q_len, kv_len))
        for q_len in (FEW, 2 * splits.keys + 1):
            yield _split(spec, splits, one_head(q_len, 2 * splits.keys + 1, Setting(spoils="row of Q")))
        for n in MANY_SPLITS:
            kv_len = (n + 1) * splits.keys + 1
            for q_len in (FEW, kv_len)[: 2 if n == SPLITS else 1]:  # as many rows would take long
                yield _split(spec, splits, one_head(q_len, kv_len, varied=False, steep=n > SPLITS), 2 * n)
            if has_sequences(plan):
                every = ((FEW, 0), (FEW, kv_len))
                yield Aim(Shape(2, 1, 1, FEW, kv_len), Setting(multiprocessors=4 * SPLITS, lengths=every), varied=False)
    if plan.schedule.is_warp_specialized:
        for processors in (8, 1):
            for q_len, kv_len in ((FEW, FEW), (rows + 1, 2 * keys + 1), (3 * rows + 1, keys), (3 * rows + 1, 3 * keys + 1)):
                yield one_head(q_len, kv_len, Setting(multiprocessors=processors))
        if plan.wanted:
            yield one_head(rows + 1, 2 * held_by(plan)[1] + 1, Setting(multiprocessors=1))
        if plan.schedule.listed_tiles:
            yield from _many_tiles(plan)
    if divides_groups(plan):
        for processors in (1, 2 * GROUP):
            yield Aim(Shape(1, GROUP, 1, rows + 1, FEW), Setting(multiprocessors=processors), varied=False)
