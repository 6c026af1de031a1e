"""Changes of a plan's bounds of tiles, and the pairs of a problem that a kernel with them would compute."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

import numpy as np

from attngen.inspect.block_work import Case
from attngen.plan.axes import KEYS
from attngen.plan.block_map import FULL, PARTIAL
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.problems import Array
from attngen.spec.expr import Apply, Expr, constant, rewrite, walk
from attngen.spec.operator import FALSE, TRUE, ZERO, add, maximum, minimum


def wrong_pairs(case: Case, allowed: Mapping[tuple[int, int], Array]) -> Iterator[tuple[str, tuple[int, int], Array]]:
    """The changes of the plan's bounds that are wrong on a problem, each with a head (b, h) and the pairs [q_len, kv_len] that
    its kernel computes there: a tile with an allowed pair is skipped, or one with a forbidden pair counts as full. `allowed` is
    the mask [q_len, kv_len] of some heads.
    """
    keys, q_len, kv_len = case.tile[1], case.q_len, case.kv_len

    def pairs_of(kinds: Array, mask: Array) -> Array:
        each = np.repeat(np.repeat(kinds, case.rows_of_tile, 0), keys, 1)[:q_len, :kv_len]
        found: Array = (each == FULL) | (each == PARTIAL) & mask
        return found

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
    """Each bound as one of its operands, one more or less, or an end of the keys; tests always true, or without an operand."""
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
