"""The spec of a cache: the attention of the last rows of a sequence to the keys of it that lie in a longer array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attngen.spec.attention import AttentionSpec, Input
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Expr, Gather, Name, Type, constant, gather, name, rewrite
from attngen.spec.operator import add, apply, sub

USED, LEFTPAD = "cache_seqlens", "cache_leftpad"  # inputs int32 [batch]: where the keys of a sequence end, and where they begin
_BATCH, _ROW, _KEY, _ROWS, _KEYS = (name(n, Type.INT) for n in ("b", "q", "k", "q_len", "kv_len"))


def of_last_rows(spec: AttentionSpec) -> AttentionSpec:
    """`spec` of a sequence with as many rows as keys, of which a call has the last ones alone: q is the position of a row, and
    q_len is kv_len. Inputs with a dimension q_len have its last elements too. A row that a short sequence lacks has a position
    below 0, and reads inputs as the first row does."""
    before = sub(_KEYS, _ROWS)  # rows that the call has not
    position = add(_ROW, before)
    inside = apply("max", position, constant(0))

    def placed(expr: Expr, row: Expr = position) -> Expr:
        """`expr` at the rows of a call, counted from its first; `row` is the position of one."""

        def changed(node: Expr) -> Expr | None:
            if isinstance(node, Name):
                return row if node is _ROW else _KEYS if node is _ROWS else None
            if isinstance(node, Gather):
                dims = spec.input(node.input).dims
                return gather(node.input, node.type, tuple(_element(i, d) for i, d in zip(node.args, dims, strict=True)))
            return None

        return rewrite(expr, changed)

    def _element(index: Expr, dim: int | str) -> Expr:
        if dim != "q_len":
            return placed(index, inside)
        moved = placed(index)
        return _ROW if moved is position else sub(moved, before)

    return _rewritten(spec, placed)


def of_cache(spec: AttentionSpec, known: tuple[str, ...]) -> AttentionSpec:
    """`spec` of keys of which `known` is given, USED or LEFTPAD or both: others are masked, and kv_len is the number of those
    that are used, at most all."""
    elements = {one: gather(one, Type.INT, (_BATCH,)) for one in known}
    if USED in elements:
        used = apply("min", elements[USED], _KEYS)
        spec = _rewritten(spec, lambda expr: rewrite(expr, lambda node: used if node is _KEYS else None))
    masks = [apply("lt" if one == USED else "ge", _KEY, element) for one, element in elements.items()]
    mask = spec.mask
    for one in reversed(masks):
        mask = one if mask is None else apply("and", one, mask)
    inputs = tuple(Input(one, DTYPES["int32"], ("batch",)) for one in known)
    return replace(spec, mask=mask, inputs=(*inputs, *spec.inputs))


def _rewritten(spec: AttentionSpec, change: Callable[[Expr], Expr]) -> AttentionSpec:
    """`spec` with its expressions changed."""
    mask, sink, v_scale = (None if expr is None else change(expr) for expr in (spec.mask, spec.sink, spec.v_scale))
    return replace(spec, mask=mask, score=change(spec.score), sink=sink, v_scale=v_scale)
