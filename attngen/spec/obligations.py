"""Conditions for evaluating an expression: indices are inside their dimensions, divisors are not zero.

`static_mistakes` checks those that follow from the spec alone. `check_obligations` checks those that depend on sizes and params
at each call, before anything is launched, with the same interval arithmetic: first with bounds that are expressions of sizes
and params, computed once for a spec, then, if these are too wide, with bounds from the numbers of the call. Where each sequence
has lengths of its own, which the host does not know, both hold for every length up to the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NoReturn

from attngen.diagnostics import ArgumentError, Diagnostic, counted
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec, S
from attngen.spec.bounds import Range, intervals, ranges
from attngen.spec.evaluate import Computed, Numbers, on_numbers
from attngen.spec.expr import (
    MAX_LENGTH,
    Apply,
    Expr,
    ExpressionError,
    Gather,
    Name,
    Type,
    constant,
    inputs_in,
    name,
    names_in,
    walk,
)
from attngen.spec.operator import EVERY_VALUE, ONE, PYTHON, TABLE, ZERO, Interval, both, either, less, less_equal, sub
from attngen.spec.print_attn import SPELLED, expression_to_text
from attngen.spec.ranges import element_ranges, name_ranges

DIVISIONS = ("floordiv", "mod")
MAX_PART = 60  # characters of an expression that a message shows
INT32 = (-(2**31), 2**31 - 1)


class ObligationError(ArgumentError):
    """A call with sizes or params for which an expression reads outside a captured tensor or divides by zero. `diagnostic`
    names the statement of `attention` at fault."""

    def __init__(self, message: str, attention: str = "", diagnostic: Diagnostic | None = None) -> None:
        super().__init__(message)
        self.attention = attention
        self.diagnostic = diagnostic


def _refuse(spec: AttentionSpec, diagnostic: Diagnostic) -> NoReturn:
    message = f"attention `{spec.name}`: {diagnostic.message}; {diagnostic.advice}"
    raise ObligationError(message, spec.name, diagnostic) from None


def static_mistakes(spec: AttentionSpec, keyword: str, expr: Expr) -> Iterator[Diagnostic]:
    """Obligations of `expr` that fail, or cannot be proved, for every call."""
    names = name_ranges(spec)
    names |= {n: (1, names[n][1]) for n in (*SIZES, *spec.free_dims) if names[n][0] == 0}  # with a size of 0 nothing is read
    known = ranges(expr, names, element_ranges(spec))
    for node in walk(expr):
        if isinstance(node, Gather):
            yield from _static_indices(spec, keyword, node, known)
        if isinstance(node, Apply) and node.op in DIVISIONS:
            divisor = node.args[1]
            low, high = known[divisor]
            if low <= 0 <= high and _from_data(divisor):
                infix = TABLE[node.op].infix
                yield mistakes.DivisionByZero(
                    statement=keyword, symbol=infix.symbol if infix else node.op, why=_why_unknown(divisor, known)
                )


def _static_indices(spec: AttentionSpec, keyword: str, node: Gather, known: Mapping[Expr, Range]) -> Iterator[Diagnostic]:
    dims = spec.input(node.input).dims
    assert len(dims) == len(node.args), node
    for position, (index, dim) in enumerate(zip(node.args, dims, strict=True)):
        low, high = known[index]
        last = str(dim - 1) if isinstance(dim, int) else f"{dim} - 1"
        if _from_data(index) and (low < 0 or high >= MAX_LENGTH):
            yield mistakes.IndexFromData(
                statement=keyword,
                part=node.input,
                position=position,
                name=node.input,
                problem="comes from data" if inputs_in(index) else "may lie outside of the dimension",
                why=_why_unknown(index, known),
                cure="write 0" if dim == 1 else f"keep it inside: clamp(..., 0, {last})",
            )
        elif isinstance(dim, int) and dim > 0 and (low < 0 or high >= dim) and not names_in(index):
            yield mistakes.IndexOutOfRange(
                statement=keyword,
                part=node.input,
                position=position,
                name=node.input,
                can_be=f"is {low}" if low == high else f"can be {low} to {high}",
                size=counted(dim, "element"),
                last=dim - 1,
                cure="write 0" if dim == 1 else f"keep it inside: clamp(..., 0, {dim - 1})",
            )


def _from_data(expr: Expr) -> bool:
    """Whether the value comes from a captured tensor or a float, so that its range may be unknown."""
    return bool(inputs_in(expr)) or any(map(_is_rounded, walk(expr)))


def _is_rounded(node: Expr) -> bool:
    """Whether a node is a float that becomes an integer."""
    return isinstance(node, Apply) and node.op == "int" and node.args[0].type is Type.FLOAT


def _why_unknown(expr: Expr, known: Mapping[Expr, Range]) -> str:
    """The part of `expr` with the widest range, an element of a tensor or a float that becomes an integer, in words."""
    parts = [node for node in walk(expr) if node.type is Type.INT and (isinstance(node, Gather) or _is_rounded(node))]
    part = max(parts, key=lambda node: known[node][1] - known[node][0])
    text = expression_to_text(part)
    shown = f"`{text}`" if len(text) <= MAX_PART else "an integer made of a float"
    if inputs_in(part) or known[part] == INT32:
        return f"the range of {shown} is unknown"
    return f"{shown} can be {known[part][0]} to {known[part][1]}"


def check_obligations(spec: AttentionSpec, sizes: Mapping[str, int], params: Mapping[str, int | float]) -> None:
    """Checks the numbers of heads, the share of dropped weights, and every index and divisor of `spec`, for a call with these
    sizes and params.

    Raises ArgumentError for numbers of heads, and ObligationError, which names the tensor, the range of the index and the size.
    Of a call without rows or keys, what kernels evaluate all the same is checked too.
    """
    q_heads, kv_heads = sizes["q_heads"], sizes["kv_heads"]
    if q_heads and (kv_heads == 0 or q_heads % kv_heads):
        raise ArgumentError(f"{q_heads} query heads of `q` cannot share {kv_heads} key/value heads of `k`")
    _check_dropout(spec, params)
    _check_tables(spec, sizes)
    if sizes["batch"] and sizes["q_heads"]:
        for part, shortest in _parts(spec):
            if sizes["q_len"] >= shortest[0] and sizes["kv_len"] >= shortest[1] and sizes["q_len"] + sizes["kv_len"]:
                _check_part(part, shortest, sizes, params)


Shortest = tuple[int, int]  # the fewest rows and keys of a sequence for which a kernel evaluates an expression


@lru_cache(maxsize=256)
def _parts(spec: AttentionSpec) -> tuple[tuple[AttentionSpec, Shortest], ...]:
    """`spec` with one of its expressions each. Scores and scales of V are those of pairs, and each row has a sink, but the
    bounds of a mask are evaluated for rows without keys, and for keys without rows. Positions of a rotation hold for the
    longest sequence alone: a kernel takes the nearest row of a table, and rows before the first key of a shorter sequence have
    no pairs."""
    of_pairs = replace(spec, mask=None, rotary=None, sink=None), (1, 1)
    of_rotary = replace(spec, score=S, mask=None, sink=None, v_scale=None, kernel=replace(spec.kernel, storage="dense")), (1, 1)
    of_mask = replace(spec, score=S, rotary=None, sink=None, v_scale=None), (0, 0)
    of_sink = replace(spec, score=S, rotary=None, mask=None, v_scale=None), (1, 0)
    rotated = [of_rotary] if spec.rotary is not None else []
    return (of_pairs, *rotated, *([of_mask] if spec.mask is not None else []), *([of_sink] if spec.sink is not None else []))


def _check_part(spec: AttentionSpec, shortest: Shortest, sizes: Mapping[str, int], params: Mapping[str, int | float]) -> None:
    of_call = tuple(sorted(sizes.items()))
    numbers = tuple(sorted((n, v) for n, v in params.items() if isinstance(v, int)))
    if not own_lengths(spec):
        if not _surely_holds(spec, {**sizes, **params}):
            _check(spec, shortest, of_call, numbers)
        return
    try:
        _check(spec, shortest, of_call, numbers)
    except ObligationError:
        if not _holds_for_each_length(spec, shortest, of_call, tuple(sorted(params.items()))):
            raise


def own_lengths(spec: AttentionSpec) -> tuple[str, ...]:
    """Those of q_len and kv_len that are the lengths of each sequence, and at most the size of that name."""
    return tuple(longest.removeprefix("max_") for longest in spec.kernel.longest)


MAX_LENGTHS = 2**20  # numbers of rows and keys that are tried


@lru_cache(maxsize=1024)
def _holds_for_each_length(
    spec: AttentionSpec, shortest: Shortest, sizes: tuple[tuple[str, int], ...], params: tuple[tuple[str, int | float], ...]
) -> bool:
    """Whether the conditions hold for sequences of every number of rows and keys, up to the longest."""
    import numpy as np

    size, own = dict(sizes), own_lengths(spec)
    if (conditions := _conditions(spec, np)) is None or prod([size[length] for length in own]) > MAX_LENGTHS:
        return False
    lengths = np.ix_(*[np.arange(least, size[length] + 1) for length, least in _lengths_from(spec, shortest).items()])
    numbers = {**size, **dict(params), **dict(zip(own, lengths, strict=True))}
    with np.errstate(all="ignore"):
        found = conditions({**numbers, **{f"max_{length}": size[length] for length in own}})
    return all(bool(np.all(holds)) for holds in found)


def _lengths_from(spec: AttentionSpec, shortest: Shortest) -> dict[str, int]:
    """The smallest of each length that a sequence has for itself."""
    return {length: shortest[length == "kv_len"] for length in own_lengths(spec)}


def _check_dropout(spec: AttentionSpec, params: Mapping[str, int | float]) -> None:
    """Raises ObligationError for a param that is no share of weights to drop."""
    p = spec.dropout
    if isinstance(p, Name) and p.name in params and not 0.0 <= params[p.name] < 1.0:
        _refuse(spec, mistakes.CallDropoutOutOfRange(statement="dropout", name=p.name, value=repr(params[p.name])))


def _check_tables(spec: AttentionSpec, sizes: Mapping[str, int]) -> None:
    """Raises ArgumentError for a table of a rotation without a row: rows without a key are rotated too."""
    for table in spec.rotary.tables if spec.rotary is not None else ():
        dim = spec.input(table).dims[0]
        if sizes.get(str(dim), 1) == 0 and sizes["batch"] * (sizes["q_len"] + sizes["kv_len"]):
            raise ArgumentError(f"`{table}` has no row; pass cosines and sines of at least one position")


def conditions_of_call(spec: AttentionSpec) -> Iterator[tuple[Shortest, tuple[Expr, ...] | None]]:
    """Conditions over sizes and params that together imply what `check_obligations` checks of indices and divisors, and for how
    many rows and keys at least they are needed; None if a bound does not fit 64 bits. q_len and kv_len are those of the longest
    sequence."""
    for part, shortest in _parts(spec):
        yield shortest, _condition_expressions(part, shortest)


def _surely_holds(spec: AttentionSpec, numbers: Numbers) -> bool:
    conditions = _conditions(spec)
    try:
        return conditions is not None and all(conditions(numbers))
    except ArithmeticError:
        return False


EXTENTS = dict(zip(INDICES, ("batch", "q_heads", "q_len", "kv_len"), strict=True))


@lru_cache(maxsize=256)
def _conditions(spec: AttentionSpec, xp: object = PYTHON) -> Computed | None:
    """`_condition_expressions` as a function of numbers."""
    conditions = _condition_expressions(spec)
    return None if conditions is None else on_numbers(*conditions, xp=xp)


def _condition_expressions(spec: AttentionSpec, shortest: Shortest | None = None) -> tuple[Expr, ...] | None:
    """Conditions over sizes and params that together imply the obligations of `spec`; None if a bound does not fit 64 bits. If
    sequences have lengths of their own, q_len and kv_len are those of one, and max_q_len and max_kv_len sizes of dimensions.
    With `shortest`, q_len and kv_len are these sizes, and the conditions imply the obligations for every length from `shortest`
    up to them."""
    elements, own = element_ranges(spec), own_lengths(spec)
    least = _lengths_from(spec, shortest) if shortest is not None else {}

    def size(dim: int | str) -> Expr:
        is_own = dim in own and dim not in least
        return constant(dim) if isinstance(dim, int) else name(f"max_{dim}" if is_own else dim, Type.INT)

    def of_name(node: Name) -> Interval:
        if node.name in least:
            return Interval(constant(least[node.name]), node)
        return Interval(ZERO, sub(name(EXTENTS[node.name], Type.INT), ONE)) if node.name in EXTENTS else Interval(node, node)

    def of_gather(node: Gather, _: tuple[Interval, ...]) -> Interval:
        known = elements.get(node.input)
        return EVERY_VALUE[node.type] if known is None else Interval(constant(known[0]), constant(known[1]))

    conditions: list[Expr] = []
    try:
        for _, expr in expressions_that_read(spec):
            bounds = intervals(expr, lambda n: EVERY_VALUE[n.type] if n.name == "s" else of_name(n), of_gather)
            for node in walk(expr):
                if isinstance(node, Gather):
                    for index, dim in zip(node.args, spec.input(node.input).dims, strict=True):
                        conditions.append(both(less_equal(ZERO, bounds[index].lo), less(bounds[index].hi, size(dim))))
                if isinstance(node, Apply) and node.op in DIVISIONS:
                    low, high = bounds[node.args[1]]
                    conditions.append(either(less(ZERO, low), less(high, ZERO)))
    except ExpressionError:  # a bound does not fit 64 bits
        return None
    return tuple(dict.fromkeys(conditions))


def expressions_that_read(spec: AttentionSpec) -> Iterator[tuple[str, Expr]]:
    """The expressions that may read captured tensors, with their keywords."""
    yield from ((keyword, expr) for keyword, expr in spec.expressions.items() if keyword not in ("scale", "dropout"))
    if spec.rotary is not None:
        yield from (("rotary", element) for element in spec.rotary.elements())


def call_ranges(sizes: Mapping[str, int], params: Mapping[str, int | float]) -> dict[str, Range]:
    """The range of every integer name in a call with these sizes and params."""
    known = {n: v for n, v in params.items() if isinstance(v, int)}
    names: dict[str, Range] = {name: (value, value) for name, value in (*sizes.items(), *known.items())}
    return names | {index: (0, sizes[dim] - 1) for index, dim in EXTENTS.items()}


@lru_cache(maxsize=1024)
def _check(
    spec: AttentionSpec, shortest: Shortest, sizes: tuple[tuple[str, int], ...], params: tuple[tuple[str, int], ...]
) -> None:
    size = dict(sizes)
    names = call_ranges(size, dict(params))
    names |= {length: (least, size[length]) for length, least in _lengths_from(spec, shortest).items()}
    for keyword, expr in expressions_that_read(spec):
        known = ranges(expr, names, element_ranges(spec))
        for node in walk(expr):
            if isinstance(node, Gather):
                _check_indices(spec, keyword, node, known, size)
            if isinstance(node, Apply) and node.op in DIVISIONS:
                _check_divisor(spec, keyword, node, known[node.args[1]])


def _check_divisor(spec: AttentionSpec, keyword: str, node: Apply, divisor: Range) -> None:
    low, high = divisor
    if low <= 0 <= high:
        infix, names = TABLE[node.op].infix, sorted(names_in(node.args[1]))
        can_be = "is 0" if low == high else f"can be 0: it is between {low} and {high}"
        part = names[0] if names else None
        symbol = infix.symbol if infix else node.op
        _refuse(spec, mistakes.CallDividesByZero(statement=keyword, part=part, symbol=symbol, can_be=can_be))


def _check_indices(
    spec: AttentionSpec, keyword: str, node: Gather, known: Mapping[Expr, Range], size: Mapping[str, int]
) -> None:
    for position, (index, dim) in enumerate(zip(node.args, spec.input(node.input).dims, strict=True)):
        count = dim if isinstance(dim, int) else size[dim]
        low, high = known[index]
        if low < 0 or high >= count:
            outside = mistakes.CallIndexOutOfRange(
                statement=keyword,
                part=node.input,
                position=position,
                name=node.input,
                can_be=f"is {low}" if low == high else f"can be {low} to {high}",
                of_dim="" if isinstance(dim, int) else f" ({dim})",
                count=counted(count, "element"),
                cure=_cure(index, position, count),
            )
            _refuse(spec, outside)


def _cure(index: Expr, position: int, count: int) -> str:
    """What keeps `index` inside a dimension of `count` elements."""
    if count == 1 and isinstance(index, Name) and index.name in EXTENTS:
        size = SPELLED.get(EXTENTS[index.name], EXTENTS[index.name])
        return f"write 0 as index {position}, or declare the dimension as {size}: a tensor of size 1 is broadcast over it"
    inside = "write 0, or " if count == 1 else f"keep it inside: clamp(..., 0, {count - 1}), or " if count else ""
    return f"{inside}give a larger tensor"
