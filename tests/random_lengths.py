"""Lengths of random problems, drawn from the spec: beside each of its constants, params, bounds of masks, tiles and pages.

A kernel is wrong where a bound and a length meet: at rows that have no key, at a tile that begins beyond the last key, at the
first tile behind a constant. Lengths that know nothing of the spec meet them by chance only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from attngen.plan import Plan
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const, Expr, Type, walk

MOST = 2000  # rows or keys
SMALL = (0, 0, 1, 1, 2, 3, 5, 17)
ATTEMPTS = 40  # to find lengths with few enough pairs
# Pairs times head size, of all heads: what the emulated device computes in about a second, on tensor cores and by threads
WORK = {"forward": (40_000_000, 10_000_000), "backward": (12_000_000, 3_000_000)}
PAIRS = (30_000, 60_000, 150_000, 300_000)  # over all heads: the oracle takes longer for them than the kernel
POOL_PAGES = (1, 3, 16, 20, 64, 256)  # rows of a page that the spec does not state


@dataclass(frozen=True)
class Call:
    """The sizes and params of one problem. `rows` and `keys` are the lengths of each sequence, of at most q_len and kv_len."""

    shape: Shape
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    params: Mapping[str, int | float]
    page_size: int = 16  # rows per page of the pool, if keys lie in pages

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.rows, self.keys, strict=True))


@dataclass(frozen=True)
class Limits:
    """What the lengths of a case have to keep within."""

    work: int  # pairs times head size
    longest: int = MOST
    rows_within_keys: bool = False  # each sequence has as many keys as rows, or more


@dataclass(frozen=True)
class Marks:
    """The numbers beside which lengths are drawn: those that the spec has, and those of the plan."""

    of_spec: tuple[int, ...]
    of_plan: tuple[int, ...]
    tile: int  # the larger side of a tile

    def length(self, r: random.Random, longest: int) -> int:
        """A length below, at, beside or above a mark, or the sum or difference of two; or a small one."""
        if r.random() < 0.07:
            return r.choice(SMALL)
        marks = self.of_spec if self.of_spec and r.random() < 0.7 else self.of_plan
        mark = max(r.choice(marks), r.choice(marks)) if r.random() < 0.6 else r.choice(marks)  # many constants are small
        if r.random() < 0.2:
            mark = abs(mark + r.choice((-1, 1)) * r.choice((*self.of_spec, *self.of_plan)))
        above = [mark + tiles * self.tile + r.choice((-1, 0, 1, r.randint(0, self.tile))) for tiles in (1, 2, 3, 5)]
        found = r.choice((mark // 4, mark // 2, mark - 1, mark, mark + 1, mark + r.randint(2, 40), *above, 2 * mark))
        return max(0, min(found, longest))


def marks_of(spec: AttentionSpec, plan: Plan, params: Mapping[str, int | float]) -> Marks:
    """Those of a spec, a plan and the params of a call."""
    bounds = [b for b in (plan.bounds, plan.row_bounds) if b is not None]
    exprs = [e for e in (spec.mask, spec.score, *(e for b in bounds for e in _ends(b))) if e is not None]
    found = {abs(int(n.value)) for n in walk(*exprs) if isinstance(n, Const) and n.type is Type.INT}
    found |= {abs(value) for value in params.values() if isinstance(value, int)}
    found |= {size for i in spec.inputs for size in i.dims if isinstance(size, int)}
    q, kv, page = plan.block_q or 16, plan.block_kv or 16, spec.kernel.page_size or 1
    of_plan = {q, 2 * q, kv, 2 * kv, plan.stages * kv, (plan.stages + 1) * kv, 32 * kv, page, kv + page}
    return Marks(
        tuple(sorted(n for n in found if 1 < n < 2 * MOST)), tuple(sorted(n for n in of_plan if n <= MOST)), max(q, kv)
    )


def _ends(bounds: MaskBounds) -> tuple[Expr | None, ...]:
    return bounds.begin, bounds.end, bounds.full_begin, bounds.full_end


def draw_call(
    r: random.Random, spec: AttentionSpec, plan: Plan, heads: tuple[int, int], params: Mapping[str, int | float], limits: Limits
) -> Call:
    """One problem of `spec` whose work is within the limits; `heads` are those of queries and of keys."""
    marks = marks_of(spec, plan, params)
    few_rows = 0.6 if plan.schedule.packs_heads else 0.07
    most = min(limits.work / max(spec.head_dim, spec.head_dim_v), r.choice(PAIRS))
    for attempt in range(ATTEMPTS):
        q_len, kv_len = (marks.length(r, limits.longest) for _ in "qk")
        what = r.random()
        if what < few_rows:
            q_len = r.randint(1, 5)
        elif what < few_rows + 0.07:
            kv_len = r.choice((0, 1, 2, 9))
        elif what < few_rows + 0.2:
            kv_len = q_len
        if limits.rows_within_keys:
            q_len = min(q_len, kv_len)
        batch = 1 if attempt % 2 else r.choice((1, 1, 2, 3)) if spec.kernel.storage == "dense" else r.choice((1, 2, 3, 4))
        if attempt + 1 == ATTEMPTS:
            q_len, kv_len = (min(n, int((most / heads[0]) ** 0.5)) for n in (q_len, kv_len))
        if batch * heads[0] * q_len * kv_len <= most:
            break
    lengths = [_of_sequence(r, spec, marks, q_len, kv_len, limits) for _ in range(batch)]
    rows, keys = zip(*lengths, strict=True)
    return Call(Shape(batch, *heads, q_len, kv_len), rows, keys, params, spec.kernel.page_size or r.choice(POOL_PAGES))


def _of_sequence(
    r: random.Random, spec: AttentionSpec, marks: Marks, q_len: int, kv_len: int, limits: Limits
) -> tuple[int, int]:
    """The lengths of one sequence, in storages that have a length for each."""
    rows, keys = (
        r.choice((longest, longest, 0, r.randint(0, longest), min(marks.length(r, limits.longest), longest)))
        for longest in (q_len, kv_len)
    )
    rows = rows if spec.kernel.is_packed else q_len
    keys = keys if spec.kernel.storage != "dense" else kv_len
    return rows, max(keys, rows) if limits.rows_within_keys else keys
