"""ATen operators that move, gather and combine elements: conversions, views, reads by indices, sums (see `aten.py`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attngen.language.functions import cast, common
from attngen.language.tracer import TraceError
from attngen.spec.expr import Const, Expr, Type, constant, inputs_in, names_in
from attngen.spec.operator import FALSE, ONE, TRUE, ZERO, add, apply, both, less, maximum, minimum, mul, sub, where
from attngen.torch.aten import MEANING, Call, Indices, Lazy, literal, meaning, type_of

F0 = constant(0.0)
MAX_UNROLLED = 4096  # terms of a sum or product over a gathered row

# --- types ------------------------------------------------------------------------------------------------------------


@meaning("_to_copy")
def _(call: Call) -> Lazy:
    return call.elementwise(lambda a: cast(a, call.kind), call.args[0])


@meaning("copy")
def _(call: Call) -> Lazy:
    return call.elementwise(lambda a: cast(a, call.kind), call.args[1])


MEANING |= dict.fromkeys(("clone", "alias", "lift_fresh", "lift_fresh_copy", "_conj"), lambda call: call.args[0])


@meaning("detach")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]

    def of(at: Indices) -> Expr:
        found = source.at(at)
        if "s" in names_in(found) or not call.context.trained.isdisjoint(inputs_in(found)):
            raise TraceError(
                "detach() of what has a gradient is not available in an expression; detach tensors outside the function"
            )
        return found

    return Lazy(source.shape, source.dtype, of, source.sizes)


# --- shapes: views of a tensor ----------------------------------------------------------------------------------------


def linear(shape: Sequence[int], indices: Indices) -> Expr:
    found: Expr = ZERO
    for size, index in zip(shape, indices, strict=True):
        found = add(mul(found, constant(size)), index)
    return found


def _unraveled(shape: Sequence[int], linear: Expr) -> Indices:
    found: list[Expr] = []
    for size in reversed(shape):
        found.append(apply("mod", linear, constant(size)) if size else ZERO)
        linear = apply("floordiv", linear, constant(size)) if size else ZERO
    return tuple(reversed(found))


@meaning("view", "_unsafe_view", "_reshape_alias")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    if call.dtype is not source.dtype:
        return _with_bits_of(call, source)
    without_ones = [n for n in source.shape if n != 1]
    if without_ones == [n for n in call.shape if n != 1]:  # dimensions of size 1 come and go

        def of(at: Indices) -> Expr:
            kept = iter(i for i, n in zip(at, call.shape, strict=True) if n != 1)
            return source.at(tuple(ZERO if n == 1 else next(kept) for n in source.shape))

        return call.made(of)
    return call.made(lambda at: source.at(_unraveled(source.shape, linear(call.shape, at))))


def _with_bits_of(call: Call, source: Lazy) -> Lazy:
    """`view` with another element type: of integers of the same size, whose values wrap."""
    if (
        Type.FLOAT in (call.kind, type_of(source.dtype))
        or call.kind is Type.BOOL
        or call.dtype.itemsize != source.dtype.itemsize
    ):
        raise TraceError(
            f"the bits of {source.dtype} as {call.dtype} are not available in an expression; view outside the function"
        )
    return call.elementwise(lambda a: cast(a, call.kind), source)


MEANING |= dict.fromkeys(("squeeze", "unsqueeze"), MEANING["view"])


@meaning("expand")
def _(call: Call) -> Lazy:
    return call.elementwise(lambda a: a, call.args[0])


@meaning("permute")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    order = [d % len(call.args[1]) for d in call.args[1]]
    made = call.made(lambda at: source.at(tuple(at[order.index(d)] for d in range(len(order)))))
    return Lazy(made.shape, made.dtype, made.at, tuple(source.sizes[d] for d in order))


@meaning("select")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    dim = call.args[1] % len(source.shape)
    index = call.args[2]
    place = call.context.inside(index.number if isinstance(index, Lazy) else literal(index), source.sizes[dim])
    return _kept(call, source, dim, lambda at: source.at((*at[:dim], place, *at[dim:])))


def _kept(call: Call, source: Lazy, dim: int, at: Callable[[Indices], Expr]) -> Lazy:
    """A tensor without the dimension `dim` of `source`; the others keep their sizes."""
    made = call.made(at)
    return Lazy(made.shape, made.dtype, made.at, (*source.sizes[:dim], *source.sizes[dim + 1 :]))


@meaning("slice")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    dim, start, step = call.arg(1, "dim", 0), call.arg(2, "start"), call.arg(4, "step", 1)
    dim %= len(source.shape)
    first = slice(start, None, step).indices(source.shape[dim])[0]

    def of(at: Indices) -> Expr:
        inner = add(mul(at[dim], constant(step)), constant(first))
        return source.at((*at[:dim], inner, *at[dim + 1 :]))

    return call.made(of)


@meaning("flip")
def _(call: Call) -> Lazy:
    source, dims = call.args[0], {d % len(call.shape) for d in call.args[1]}
    return call.made(
        lambda at: source.at(
            tuple(sub(constant(n - 1), i) if d in dims else i for d, (i, n) in enumerate(zip(at, call.shape, strict=True)))
        )
    )


@meaning("cat")
def _(call: Call) -> Lazy:
    parts, dim = call.args[0], call.arg(1, "dim", 0) % len(call.shape)

    def of(at: Indices) -> Expr:
        start, pieces = 0, []
        for part in (p for p in parts if p.shape[dim]):
            size = part.shape[dim]
            local = minimum(constant(size - 1), maximum(ZERO, sub(at[dim], constant(start))))
            pieces.append((start + size, cast(part.at((*at[:dim], local, *at[dim + 1 :])), call.kind)))
            start += size
        found = pieces[-1][1]
        for end, piece in reversed(pieces[:-1]):
            found = where(less(at[dim], constant(end)), piece, found)
        return found

    return call.made(of)


def chosen(values: list[Expr], index: Expr, kind: Type) -> Expr:
    if isinstance(index, Const):
        return cast(values[int(index.value)], kind)
    found = cast(values[-1], kind)
    for n in reversed(range(len(values) - 1)):
        found = where(apply("eq", index, constant(n)), cast(values[n], kind), found)
    return found


# --- reads by indices -------------------------------------------------------------------------------------------------


@meaning("index", "_unsafe_index")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    given = call.args[1]
    given = [*given, *[None] * (len(source.shape) - len(given))]
    indexed = [(dim, index) for dim, index in enumerate(given) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in indexed):
        raise TraceError(
            "a tensor of truth values cannot be an index: the number of elements would depend on its values; write where(...)"
        )
    rank = max(len(index.shape) for _, index in indexed)
    dims = [dim for dim, _ in indexed]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    front = dims[0] if together else 0

    def of(at: Indices) -> Expr:
        by_index, others = at[front : front + rank], iter((*at[:front], *at[front + rank :]))
        found = []
        for dim, index in enumerate(given):
            if index is None:
                found.append(next(others))
            else:
                own = by_index[rank - len(index.shape) :] if index.shape else ()
                place = index.at(tuple(ZERO if n == 1 else i for i, n in zip(own, index.shape, strict=True)))
                found.append(call.context.inside(cast(place, Type.INT), source.sizes[dim]))
        return source.at(tuple(found))

    made = call.made(of)
    kept = [source.sizes[dim] for dim, index in enumerate(given) if index is None]
    sizes = (*kept[:front], *made.sizes[front : front + rank], *kept[front:])
    return Lazy(made.shape, made.dtype, made.at, sizes)


@meaning("gather")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    dim, index = call.args[1] % max(1, len(source.shape)), call.args[2]

    def of(at: Indices) -> Expr:
        place = call.context.inside(index.at(at), source.sizes[dim]) if source.shape else ZERO
        return source.at((*at[:dim], place, *at[dim + 1 :]) if source.shape else ())

    return call.made(of)


@meaning("take")
def _(call: Call) -> Lazy:
    source: Lazy = call.args[0]
    index = call.args[1]
    count = constant(math.prod(source.shape))
    return call.made(lambda at: source.at(_unraveled(source.shape, call.context.inside(index.at(at), count))))


# --- sums and other reductions of gathered rows -----------------------------------------------------------------------


def _check_length(call: Call, what: str, count: int) -> None:
    if count > MAX_UNROLLED:
        raise TraceError(f"{call.name} {what} is too long for an expression: compute it outside the function")


def _combined(combine: Callable[[Expr, Expr], Expr], terms: list[Expr]) -> Expr:
    """All terms, combined as a tree: the depth of an expression is limited."""
    while len(terms) > 1:
        terms = [combine(*terms[i : i + 2]) if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0]


def _reduced(
    call: Call, combine: Callable[[Expr, Expr], Expr], dims: Any, convert: Callable[[Expr], Expr], empty: Expr | None
) -> Lazy:
    source: Lazy = call.args[0]
    rank = len(source.shape)
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % rank for d in dims}) if rank else []
    keeps = rank > 0 and len(call.shape) == rank
    count = math.prod(source.shape[d] for d in gone)
    _check_length(call, f"over {count} elements of a captured tensor", count)

    def of(at: Indices) -> Expr:
        terms = []
        for inner in itertools.product(*(range(source.shape[d]) for d in gone)):
            kept = iter(i for d, i in enumerate(at) if not (keeps and d in gone))
            summed = iter(inner)
            terms.append(convert(source.at(tuple(constant(next(summed)) if d in gone else next(kept) for d in range(rank)))))
        if not terms:
            if empty is None:
                raise TraceError(f"{call.name} of no elements")
            return empty
        return _combined(combine, terms)

    return call.made(of)


def _to_kind(call: Call) -> Callable[[Expr], Expr]:
    return lambda e: cast(e, call.kind)


MEANING |= {
    "sum": lambda call: _reduced(call, add, call.arg(1, "dim"), _to_kind(call), cast(ZERO, call.kind)),
    "prod": lambda call: _reduced(call, mul, call.arg(1, "dim"), _to_kind(call), cast(ONE, call.kind)),
    "any": lambda call: _reduced(call, lambda a, b: apply("or", a, b), call.arg(1, "dim"), lambda e: cast(e, Type.BOOL), FALSE),
    "all": lambda call: _reduced(call, both, call.arg(1, "dim"), lambda e: cast(e, Type.BOOL), TRUE),
    **{n: lambda call: _reduced(call, maximum, call.arg(1, "dim"), _to_kind(call), None) for n in ("amax", "max")},
    **{n: lambda call: _reduced(call, minimum, call.arg(1, "dim"), _to_kind(call), None) for n in ("amin", "min")},
}


@meaning("mean")
def _(call: Call) -> Lazy:
    total = _reduced(call, add, call.arg(1, "dim"), _to_kind(call), F0)
    count = math.prod(call.args[0].shape) / max(1, math.prod(call.shape))
    return call.made(lambda at: apply("div", total.at(at), constant(float(count))))


@meaning("mm", "bmm")
def _(call: Call) -> Lazy:
    a, b = call.args[:2]
    count = a.shape[-1]
    _check_length(call, f"of {count} elements of captured tensors", count)

    def of(at: Indices) -> Expr:
        *batch, row, column = at
        terms = [mul(*common(a.at((*batch, row, n)), b.at((*batch, n, column)))) for n in map(constant, range(count))]
        return _combined(add, terms) if terms else cast(ZERO, call.kind)

    return call.made(of)


# --- constants --------------------------------------------------------------------------------------------------------


def _filled(value: object) -> Callable[[Call], Lazy]:
    return lambda call: call.made(lambda at: cast(literal(value), call.kind))


@meaning("full", "new_full", "full_like", "scalar_tensor")
def _(call: Call) -> Lazy:
    value = call.args[0] if call.name == "scalar_tensor" else call.arg(2 if call.name == "new_full" else 1, "fill_value")
    return call.elementwise(lambda v: cast(v, call.kind), value)


@meaning("arange")
def _(call: Call) -> Lazy:
    start, step = (call.args[0] if len(call.args) > 1 else 0), (call.args[2] if len(call.args) > 2 else 1)
    return call.made(
        lambda at: add(mul(cast(at[0], call.kind), cast(literal(step), call.kind)), cast(literal(start), call.kind))
    )


MEANING |= {
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like", "zero"), _filled(0)),
}
