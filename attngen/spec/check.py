"""The checks of every spec. Text and Python specs are checked here, and only here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from attngen.diagnostics import Diagnostic, DiagnosticError, counted
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec, Normalize, Param, Precision, S
from attngen.spec.bounds import ranges
from attngen.spec.cost import MOST, MOST_OF_CALL, OF_TENSOR, cost, cost_as_tree, too_much_code
from attngen.spec.dropout import RNG_STATE
from attngen.spec.dtypes import DTYPES_OF
from attngen.spec.expr import (
    MAX_DEPTH,
    MAX_FLOAT,
    MAX_FLOAT_TEXT,
    MAX_INT_PARAM,
    MAX_LENGTH,
    MAX_SIZE,
    Apply,
    Const,
    Expr,
    ExpressionError,
    Name,
    Type,
    inputs_in,
    names_in,
    rewrite,
    walk,
)
from attngen.spec.names import derived_names, name_mistakes
from attngen.spec.obligations import static_mistakes
from attngen.spec.operator import TABLE, apply
from attngen.spec.print_attn import levels
from attngen.spec.ranges import element_ranges, name_ranges
from attngen.spec.rotary import ROTARY_MULTIPLE, Pairs, Rotary

MAX_DIMENSIONS = 8
MAX_BLOCK = 256
MAX_STAGES = 16
MAX_WARPS = 32
MAX_PAGE = 2**20
MAX_LEVELS = MAX_DEPTH - 4  # for an expression as text, in a statement of an attention of a file

# The names that an expression of each statement may use besides params, sizes and inputs.
ALLOWED: dict[str, tuple[str, ...]] = {
    "mask": INDICES,
    "score": ("s", *INDICES),
    "sink": ("b", "h", "q"),
    "scaled k": ("b", "h", "k"),
    "scaled v": ("b", "h", "k"),
    "scale": (),
    "dropout": (),
}

TITLES = {"scaled k": "scale of K", "scaled v": "scale of V"}  # nouns for expressions whose statement is none
OF_THE_CALL = ("scale", "dropout")  # statements whose value is one number for a call


def _has_rough_operator(spec: AttentionSpec) -> bool:
    """Whether the score uses an operator that a lower precision makes faster."""
    return any(isinstance(node, Apply) and TABLE[node.op].rough for node in walk(spec.score))


def with_scaled_keys(score: Expr, scale: Expr | None) -> Expr:
    """`score` of keys that are multiplied by `scale`: s is the product with what is stored. Raises DiagnosticError."""
    if scale is None:
        return score
    if scale.type is Type.BOOL:
        raise DiagnosticError(mistakes.NotANumber(statement="scaled k", keyword=TITLES["scaled k"], found=str(scale.type)))
    if others := names_in(scale) & {"s", "q"}:
        raise DiagnosticError(_name_not_here(min(others), "scaled k", ALLOWED["scaled k"]))
    scaled = apply("mul", S, scale)
    return rewrite(score, lambda node: scaled if node is S else None)


def check(spec: AttentionSpec) -> None:
    """Raises DiagnosticError with every mistake of `spec`."""
    found = tuple(_mistakes(spec))
    if found:
        raise DiagnosticError(*found)


def _mistakes(spec: AttentionSpec) -> Iterator[Diagnostic]:
    for tensor, dtype in spec.dtypes.items():
        if dtype not in DTYPES_OF[tensor]:
            known = ", ".join(t.name for t in DTYPES_OF[tensor])
            hint = "not a float type" if dtype.kind != "float" else "its numbers are too coarse"
            of_what = f" of {tensor.upper()}"
            yield mistakes.UnknownDType(statement="dtype", dtype=dtype.name, of_what=of_what, hint=hint, known=known)
            break
    yield from _head_size(spec.head_dim, None)
    if spec.head_dim_v != spec.head_dim:
        yield from _head_size(spec.head_dim_v, "second")
    yield from _values(spec)
    yield from _heads(spec)
    for i in spec.inputs:
        yield from _dimensions(i.name, i.dims)
    yield from _names(spec)
    yield from _schedule(spec)
    if spec.precision not in get_args(Precision):
        hint = f"not one of {', '.join(get_args(Precision))}"
        yield mistakes.UnknownPrecision(statement="precision", found=spec.precision, hint=hint)
    elif spec.precision != "highest" and spec.dtype.name != "fp32" and not _has_rough_operator(spec):
        yield mistakes.PrecisionHasNoEffect(statement="precision", dtype=spec.dtype.name)
    if spec.normalize not in get_args(Normalize):
        hint = f"not one of {', '.join(get_args(Normalize))}"
        yield mistakes.UnknownNormalize(statement="normalize", found=spec.normalize, hint=hint)
        return
    if spec.normalize != "softmax":
        if spec.lse:
            yield mistakes.LseNeedsSoftmax(statement="output", normalize=spec.normalize)
        if spec.sink is not None:
            yield mistakes.SinkNeedsSoftmax(statement="sink", normalize=spec.normalize)
    yield from _expressions(spec)


def _values(spec: AttentionSpec) -> Iterator[Diagnostic]:
    """Mistakes of values that are a part of the keys."""
    if spec.values is None:
        return
    begin, end = spec.values
    found = ""
    if not 0 <= begin < end <= spec.head_dim:
        found = f"a row of K has the columns 0:{spec.head_dim}"
    elif begin % 8:
        found = "the first column is a multiple of 8"
    elif end - begin != spec.head_dim_v:
        found = f"`head_dim` says that V has {counted(spec.head_dim_v, 'column')}"
    elif spec.dtypes["v"] is not spec.dtypes["k"]:
        found = f"`dtype` says that V is {spec.dtypes['v']}, and K {spec.dtypes['k']}"
    if found:
        yield mistakes.BadValues(statement="values", begin=begin, end=end, found=found, head_dim=spec.head_dim)


def _head_size(size: int, part: str | None) -> Iterator[Diagnostic]:
    if size < 8:
        yield mistakes.HeadDimTooSmall(statement="head_dim", part=part, size=size)
    elif size % 8:
        below = size // 8 * 8
        yield mistakes.HeadDimNotMultiple(statement="head_dim", part=part, size=size, below=below, above=below + 8)


def _heads(spec: AttentionSpec) -> Iterator[Diagnostic]:
    if spec.q_heads is None or spec.kv_heads is None:
        assert spec.q_heads is spec.kv_heads, "both head counts or neither"
        return
    limit = 65535
    for count in (spec.q_heads, spec.kv_heads):
        if not 1 <= count <= limit:
            yield mistakes.NoHeads(statement="heads", count=count, limit=limit)
            return
    if spec.q_heads % spec.kv_heads:
        divisors = [str(n) for n in range(1, spec.q_heads + 1) if spec.q_heads % n == 0]
        shown = divisors if len(divisors) <= 8 else [*divisors[:7], divisors[-1]]
        text = f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]
        yield mistakes.HeadsDoNotDivide(
            statement="heads", part="second", q_heads=spec.q_heads, kv_heads=spec.kv_heads, divisors=text
        )


def _dimensions(name: str, dims: tuple[int | str, ...]) -> Iterator[Diagnostic]:
    if len(dims) > MAX_DIMENSIONS:
        yield mistakes.TooManyDimensions(statement=f"input {name}", name=name, count=len(dims), limit=MAX_DIMENSIONS)
    for dim in dims:
        if isinstance(dim, int) and not 1 <= dim <= MAX_LENGTH:
            yield mistakes.DimensionOutOfRange(statement=f"input {name}", part=str(dim), size=dim, limit=MAX_LENGTH)


def _names(spec: AttentionSpec) -> Iterator[Diagnostic]:
    """Mistakes of names. They become part of generated text, so each must be a plain identifier."""
    yield from name_mistakes(spec.name, title=True)
    seen: set[str] = set()
    for statement, declared in (("input", spec.inputs), ("param", spec.params)):
        for one in declared:
            yield from name_mistakes(one.name, statement=f"{statement} {one.name}")
            if one.name in seen or one.name in spec.free_dims:
                taken_by = "an input, param or dimension has this name"
                yield mistakes.DuplicateName(statement=f"{statement} {one.name}", name=one.name, taken_by=taken_by)
            seen.add(one.name)
    kernel = spec.kernel
    for clash in sorted(seen & {*kernel.beginnings, *kernel.longest}):
        statement = f"input {clash}" if clash in {other.name for other in spec.inputs} else f"param {clash}"
        taken_by = f"an argument of {kernel.storage} storage has this name"
        yield mistakes.DuplicateName(statement=statement, name=clash, taken_by=taken_by)
    taken = seen | set(spec.free_dims)
    for name in sorted({"seed", "offset"} & seen) if spec.dropout is not None else ():
        statement = f"input {name}" if name in {i.name for i in spec.inputs} else f"param {name}"
        yield mistakes.DuplicateName(statement=statement, name=name, taken_by="it is an argument of calls with dropout")
    for i in spec.inputs:
        for clash in sorted(taken & set(derived_names(i.name, len(i.dims)))):
            taken_by = f"generated code uses it for input `{i.name}`"
            statement = f"input {clash}" if clash in {other.name for other in spec.inputs} else f"param {clash}"
            yield mistakes.DuplicateName(statement=statement, name=clash, taken_by=taken_by)
        for dim in i.dims:
            if isinstance(dim, str) and dim not in SIZES:
                yield from name_mistakes(dim, statement=f"input {i.name}")


def _schedule(spec: AttentionSpec) -> Iterator[Diagnostic]:
    request = spec.kernel
    for what, value in (("tile rows", request.block_q), ("tile keys", request.block_kv)):
        if value is not None and not 1 <= value <= MAX_BLOCK:  # those that fit are the planner's to name
            limits, cure = f"from 1 to {MAX_BLOCK}", "leave `tile` to the planner"
            yield mistakes.BadTile(statement="kernel", what=what, value=value, limits=limits, cure=cure)
    for what, value, limit in (("stages", request.stages, MAX_STAGES), ("warps", request.warps, MAX_WARPS)):
        if value is not None and not 1 <= value <= limit:
            cure = f"leave `{what}` to the planner"
            yield mistakes.BadTile(statement="kernel", what=what, value=value, limits=f"from 1 to {limit}", cure=cure)
    if request.page_size is not None and not (request.is_paged and 1 <= request.page_size <= MAX_PAGE):
        limits = f"of storage paged or packed_paged, from 1 to {MAX_PAGE}"
        cure = "leave out `page_size`: it comes with the pool"
        yield mistakes.BadTile(statement="kernel", what="page_size", value=request.page_size, limits=limits, cure=cure)


def _expressions(spec: AttentionSpec) -> Iterator[Diagnostic]:
    given = spec.expressions
    for keyword, expr in given.items():
        yield from _expression(spec, keyword, expr)
    yield from _dropout(spec)
    yield from _rotary(spec)
    yield from _code(spec)
    read = [*given.values(), *(spec.rotary.positions if spec.rotary is not None else ())]
    used = names_in(*read) | inputs_in(*read) | ({RNG_STATE.name} if spec.dropout is not None else set())
    used |= {*spec.rotary.tables} if spec.rotary is not None else set()
    for i in spec.inputs:
        if i.name not in used:
            yield mistakes.Unused(statement=f"input {i.name}", what="input", name=i.name)
    for p in spec.params:
        yield from _default(p)
        if p.name not in used:
            yield mistakes.Unused(statement=f"param {p.name}", what="param", name=p.name)


def _code(spec: AttentionSpec) -> Iterator[Diagnostic]:
    """Whether compilers would take too long for the spec's expressions."""
    of_call = cost_as_tree(spec.scale)
    if of_call > MOST_OF_CALL:
        yield too_much_code("scale", "scale", [spec.scale], MOST_OF_CALL, of_call)
    positions = spec.rotary.positions if spec.rotary is not None else ()
    of_elements = {keyword: [e] for keyword, e in spec.expressions.items() if keyword not in OF_THE_CALL}
    computed = of_elements | {"rotary": [*positions]}
    costs = {keyword: sum(map(cost, exprs)) for keyword, exprs in computed.items()}
    total = sum(costs.values()) + OF_TENSOR * len(spec.inputs)
    if total > MOST:
        largest = max(costs, key=costs.__getitem__)
        what = {"rotary": "positions of the rotation"}.get(largest, largest)
        yield too_much_code(largest, what, computed[largest], MOST, total, len(spec.inputs))


def _default(param: Param) -> Iterator[Diagnostic]:
    """Mistakes of a param's default, if it has one."""
    default, statement = param.default, f"param {param.name}"
    if default is None:
        return
    is_typed = type(default) is {Type.INT: int, Type.FLOAT: float}.get(param.type)
    if not is_typed or default != default:
        found = "not a number (NaN)" if is_typed else f"a {type(default).__name__}"
        yield mistakes.BadDefault(statement=statement, part="default", name=param.name, expected=str(param.type), found=found)
    elif param.type is Type.INT and abs(default) > MAX_INT_PARAM:
        yield mistakes.NumberTooLarge(statement=statement, part="default", number=magnitude(default), limit=str(MAX_INT_PARAM))
    elif param.type is Type.FLOAT and MAX_FLOAT < abs(default) < math.inf:
        yield mistakes.NumberTooLarge(statement=statement, part="default", number=repr(default), limit=MAX_FLOAT_TEXT)


def _dropout(spec: AttentionSpec) -> Iterator[Diagnostic]:
    """Mistakes of the share that is dropped: it is a number or a float param, and so is the default of that param."""
    p = spec.dropout
    if p is None or p.type is not Type.FLOAT:
        return
    if not isinstance(p, (Const, Name)):
        yield mistakes.DropoutNotANumber(statement="dropout")
        return
    value = p.value if isinstance(p, Const) else next((d.default for d in spec.params if d.name == p.name), None)
    if isinstance(value, (int, float)) and math.isfinite(value) and not 0.0 <= value < 1.0:
        statement = "dropout" if isinstance(p, Const) else f"param {p.name}"
        yield mistakes.DropoutOutOfRange(statement=statement, value=repr(value))


def _rotary(spec: AttentionSpec) -> Iterator[Diagnostic]:
    """Mistakes of the rotation: its size, its tables, its positions."""
    rotary = spec.rotary
    if rotary is None:
        return
    if spec.kernel.is_paged:
        yield mistakes.RotaryOfPages(statement="kernel", storage=spec.kernel.storage)
    largest = spec.head_dim // ROTARY_MULTIPLE * ROTARY_MULTIPLE
    if rotary.dim % ROTARY_MULTIPLE or not 0 < rotary.dim <= largest:
        below = min(rotary.dim // ROTARY_MULTIPLE * ROTARY_MULTIPLE, largest)
        cure = f"rotate {max(below, ROTARY_MULTIPLE)}" if largest else f"use head_dim {ROTARY_MULTIPLE} or more"
        limits = f"a multiple of {ROTARY_MULTIPLE} up to head_dim"
        yield mistakes.BadRotaryDim(
            statement="rotary", part="dim", dim=rotary.dim, head_dim=spec.head_dim, limits=limits, cure=cure
        )
        return
    if rotary.pairs not in get_args(Pairs):
        hint = f"not one of {', '.join(get_args(Pairs))}"
        yield mistakes.UnknownPairs(statement="rotary", found=rotary.pairs, hint=hint)
    wrong = [found for table in dict.fromkeys(rotary.tables) for found in _table(spec, rotary, table)]
    for expr, index, other in ((rotary.q, "q", "k"), (rotary.k, "k", "q")):
        wrong += _position(spec, expr, index, other)
    yield from wrong
    if not wrong:
        yield from dict.fromkeys(found for e in rotary.elements() for found in static_mistakes(spec, "rotary", e))


def _table(spec: AttentionSpec, rotary: Rotary, table: str) -> Iterator[Diagnostic]:
    """Why `table` cannot be one of cosines or sines."""
    declared = next((i for i in spec.inputs if i.name == table), None)
    found = "there is no such input"
    if declared is not None:
        if declared.dtype.kind == "float" and len(declared.dims) == 2 and declared.dims[1] == rotary.dim // 2:
            first = next((i for i in spec.inputs if i.name == rotary.cosines), declared)
            if declared.dtype is first.dtype or first.dtype.kind != "float":
                return
        found = f"it is {declared.dtype.name}[{', '.join(map(str, declared.dims))}]"
    yield mistakes.RotaryTable(statement="rotary", part=table, name=table, dim=rotary.dim, pairs=rotary.dim // 2, found=found)


def _position(spec: AttentionSpec, expr: Expr, index: str, other: str) -> Iterator[Diagnostic]:
    """Mistakes of the position of row `q` or key `k`, by `index`."""
    params = (p.name for p in spec.params)
    allowed = ("b", index, *params, *SIZES, *spec.free_dims)
    where = {"q": "position of rows", "k": "position of keys"}[index]
    if expr.type is not Type.INT:
        yield mistakes.RotaryPosition(statement="rotary", where=where, found=str(expr.type))
        return
    for name in sorted(names_in(expr) - {*allowed}):
        reason = f"the {where} depends on {index}, not on {other}" if name == other else f"the {where} is one for all heads"
        yield mistakes.NameNotHere(
            statement="rotary", part=name, name=name, where=where, reason=reason, cure=f"use only {', '.join(allowed)}"
        )
        return
    try:
        ranges(expr, name_ranges(spec), element_ranges(spec))
    except ExpressionError:
        yield _might_overflow(spec, "rotary", expr)


def _expression(spec: AttentionSpec, keyword: str, expr: Expr) -> Iterator[Diagnostic]:
    if keyword == "mask" and expr.type is not Type.BOOL:
        yield mistakes.NotATruthValue(statement=keyword, found=str(expr.type))
    if keyword != "mask" and expr.type is Type.BOOL:
        yield mistakes.NotANumber(statement=keyword, keyword=TITLES.get(keyword, keyword), found=str(expr.type))
    params = tuple(p.name for p in spec.params)
    allowed = (*ALLOWED[keyword], *params) if keyword in OF_THE_CALL else (*ALLOWED[keyword], *params, *SIZES, *spec.free_dims)
    for name in sorted(names_in(expr)):
        if name not in allowed:
            yield _name_not_here(name, keyword, allowed)
            return
    if keyword in OF_THE_CALL and inputs_in(expr):
        yield _name_not_here(min(inputs_in(expr)), keyword, allowed)
        return
    if isinstance(expr, Const) and expr.type is not Type.BOOL:
        yield from _constant(keyword, expr.value)
    if expr.size > MAX_SIZE:
        yield mistakes.ExpandsTooMuch(statement=keyword, limit=MAX_SIZE)
        return
    if levels(expr) > MAX_LEVELS:  # torch's operator gets the spec as text, which is parsed again
        yield mistakes.NestedTooDeeply(statement=keyword, limit=MAX_DEPTH)
        return
    for node in walk(expr):
        if isinstance(node, Const) and MAX_FLOAT < abs(node.value) < math.inf:
            yield mistakes.NumberTooLarge(statement=keyword, number=repr(node.value), limit=MAX_FLOAT_TEXT)
            return
    try:
        ranges(expr, name_ranges(spec), element_ranges(spec))
    except ExpressionError:
        yield _might_overflow(spec, keyword, expr)
        return
    yield from static_mistakes(spec, keyword, expr)


def _might_overflow(spec: AttentionSpec, keyword: str, expr: Expr) -> Diagnostic:
    wide = [f"`{i.name}`" for i in spec.inputs if i.dtype.name == "int64" and i.name in inputs_in(expr)]
    return mistakes.MightOverflow(statement=keyword, operands=f"elements of {', '.join(wide)}" if wide else "its operands")


def _constant(keyword: str, value: float) -> Iterator[Diagnostic]:
    """Mistakes of an expression that is a number."""
    no_sink = keyword == "sink" and value == -math.inf
    if not math.isfinite(value) and not no_sink:
        yield mistakes.NotFinite(statement=keyword, keyword=TITLES.get(keyword, keyword), value=str(value))
    elif keyword == "sink" and MAX_SINK < abs(value) <= MAX_FLOAT:
        yield mistakes.SinkTooLarge(statement=keyword, value=repr(value))


MAX_SINK = 1e37  # kernels divide a sink by the scale, and multiply lse by it


def magnitude(number: float) -> str:
    """A short text for a number that is too large."""
    return str(number) if abs(number) < 2**64 else f"10^{round(int(number).bit_length() * 0.30103)}"


def _name_not_here(name: str, keyword: str, allowed: tuple[str, ...]) -> Diagnostic:
    reasons = {keyword: f"the {keyword} is one number for the whole call" for keyword in OF_THE_CALL}
    reasons |= {"sink": "a sink is one logit for the whole row"}
    reasons |= dict.fromkeys(("scaled k", "scaled v"), "a key has one scale for all rows")
    reason = "the scaled dot product belongs to the score" if name == "s" else reasons[keyword]
    cure = f"use only {', '.join(allowed) or 'constants'}"
    if (name, keyword) == ("s", "mask"):
        cure = "state the condition in the score: where(condition, s, -inf)"
    where = TITLES.get(keyword, keyword)
    return mistakes.NameNotHere(statement=keyword, part=name, name=name, where=where, reason=reason, cure=cure)
