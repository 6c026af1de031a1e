"""The Python spec: keyword arguments, masks and scores as text or as plain Python functions -> the same AttentionSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from operator import index
from typing import Any, ParamSpec, TypeVar, get_args

from attngen.diagnostics import DiagnosticError, refuse_keywords
from attngen.language.block import as_float, default_scale
from attngen.language.prelude import prelude
from attngen.language.resolve import Resolver, Scope, Value
from attngen.language.syntax import parse_expression
from attngen.language.trace import CapturedArray, Tracer, trace
from attngen.source import SourceFile
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec, Input, Normalize, Param, Precision, Rung, S, Schedule
from attngen.spec.check import check, magnitude
from attngen.spec.dtypes import DTYPES, STORAGE_DTYPES
from attngen.spec.expr import MAX_FLOAT_TEXT, Expr, Type, constant, inputs_in, name
from attngen.spec.names import SPELLED, check_name

Written = str | Callable[..., Any] | None


P = ParamSpec("P")
R = TypeVar("R")


def _named_keywords(function: Callable[P, R], name: str) -> Callable[P, R]:
    """`function` of keywords, under `name`: a keyword that it does not have is named, with a guess."""
    described = signature(function)

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if args:
            raise TypeError(f"{name} takes keywords, as in {name}(mask=...)")
        refuse_keywords(name, keywords, described.parameters)
        return function(*args, **keywords)

    call.__name__ = call.__qualname__ = name
    return call


def _describe(
    *,
    name: str = "attention",
    dtype: str = "fp16",
    head_dim: int = 64,
    head_dim_v: int | None = None,
    heads: tuple[int, int] | None = None,
    mask: Written = None,
    score: Written = None,
    scale: float | str | None = None,
    sink: Written | float = None,
    inputs: Mapping[str, tuple[str, tuple[int | str, ...]]] | None = None,
    params: Mapping[str, Any] | None = None,
    normalize: Normalize = "softmax",
    lse: bool = False,
    precision: Precision = "highest",
    kernel: Rung = "auto",
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    warps: int | None = None,
) -> tuple[AttentionSpec, dict[str, Any]]:
    """An AttentionSpec, and the arrays that functions captured, by name: `traced` gives the pair, `define` the spec.

    `heads` is (query heads, key/value heads); `inputs` maps names to (dtype, dims); `params` maps names to "int", "float",
    (type, default), or a default alone. `mask`, `score` and `sink` are text of the language or functions: (s, b, h, q, k) or,
    without s, (b, h, q, k). Arrays that a function refers to are captured with the sizes they have, a dimension that is
    indexed by a plain index of the same size at call time included. Raises DiagnosticError as the text would, TraceError for
    what a function cannot say, TypeError for an argument that is of no such type.
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` is {name!r}; expected a str")
    check_name(name, title=True)
    head_dim = _whole("head_dim", head_dim)
    head_dim_v = head_dim if head_dim_v is None else _whole("head_dim_v", head_dim_v)
    q_heads, kv_heads = _pair("heads", heads)
    block_q, block_kv = _pair("tile", tile)
    stages, warps = (None if n is None else _whole(of, n) for of, n in (("stages", stages), ("warps", warps)))
    if not isinstance(lse, bool):
        raise TypeError(f"`lse` is {lse!r}; expected True or False")
    if isinstance(scale, bool):
        raise TypeError(f"`scale` is {scale!r}; expected a number")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(t.name for t in STORAGE_DTYPES)
        raise DiagnosticError(
            mistakes.UnknownDType(statement="dtype", dtype=dtype, of_what=" of Q, K and V", hint="not supported", known=known)
        )
    declared = [_input(n, given) for n, given in _items("inputs", inputs)]
    numbers = [_param(n, given) for n, given in _items("params", params)]
    builder = _Builder(head_dim, head_dim_v, declared, numbers)
    written = (("mask", mask), ("score", score), ("sink", sink), ("scale", scale))
    exprs = {keyword: builder.expression(keyword, given) for keyword, given in written}
    used = inputs_in(*(expr for expr in exprs.values() if expr is not None))
    captures = {name: c for name, c in builder.captures.items() if name in used}  # not if only its length or dtype is asked for
    captured = [Input(c.name, DTYPES[str(c.dtype_name)], tuple(int(n) for n in c.array.shape)) for c in captures.values()]
    written_score, written_scale, written_sink = exprs["score"], exprs["scale"], exprs["sink"]
    if kernel not in get_args(Rung):
        raise DiagnosticError(mistakes.UnknownRung(statement="kernel", found=kernel, hint="not a schedule"))
    result = AttentionSpec(
        name=name,
        dtype=DTYPES[dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=default_scale(head_dim) if written_scale is None else as_float(written_scale),
        q_heads=q_heads,
        kv_heads=kv_heads,
        inputs=(*declared, *captured),
        params=tuple(numbers),
        mask=exprs["mask"],
        score=S if written_score is None else as_float(written_score),
        normalize=normalize,
        sink=None if written_sink is None else as_float(written_sink),
        lse=lse,
        precision=precision,
        schedule=Schedule(kernel, block_q, block_kv, stages, warps),
    )
    check(result)
    return result, {c.name: c.array for c in captures.values()}


def _first(describe: Callable[P, tuple[AttentionSpec, Any]]) -> Callable[P, AttentionSpec]:
    @wraps(describe)
    def spec_alone(*args: P.args, **keywords: P.kwargs) -> AttentionSpec:
        return describe(*args, **keywords)[0]

    spec_alone.__signature__ = signature(describe).replace(return_annotation="AttentionSpec")  # type: ignore[attr-defined]
    return spec_alone


traced = _named_keywords(_describe, "traced")
define = _named_keywords(_first(_describe), "define")


def _is_number(given: Any) -> bool:
    """Whether `given` is a number, numpy's too."""
    return isinstance(given, Real) and not isinstance(given, bool)


def _decimal(keyword: str, given: Any) -> float:
    """A number as a float."""
    try:
        return float(given)
    except OverflowError:
        raise DiagnosticError(
            mistakes.NumberTooLarge(statement=keyword, number=magnitude(given), limit=MAX_FLOAT_TEXT)
        ) from None


def _whole(keyword: str, given: Any) -> int:
    """A whole number, numpy's too."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"`{keyword}` is {given!r}; expected a whole number")
    return index(given)


def _pair(keyword: str, given: Any) -> tuple[int, int] | tuple[None, None]:
    if given is None:
        return None, None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"`{keyword}` is {given!r}; expected two whole numbers")
    return _whole(keyword, given[0]), _whole(keyword, given[1])


def _items(keyword: str, given: Any) -> list[tuple[str, Any]]:
    """What is declared by name."""
    if not isinstance(given or {}, Mapping):
        raise TypeError(f"`{keyword}` is {given!r}; expected a mapping from names")
    for key in given or {}:
        if not isinstance(key, str):
            raise TypeError(f"`{keyword}` has the key {key!r}; expected a name")
    return list((given or {}).items())


def _input(name: str, given: Any) -> Input:
    """From (element type, dimensions)."""
    check_name(name)
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], tuple | list):
        raise TypeError(f'input `{name}` is {given!r}; expected (element type, dimensions), as ("fp32", ("heads",))')
    dtype, dims = given
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DiagnosticError(
            mistakes.UnknownDType(
                statement=f"input {name}",
                dtype=dtype,
                of_what=" of an input",
                hint="not supported",
                known=", ".join(DTYPES),
            )
        )
    return Input(
        name, DTYPES[dtype], tuple(SPELLED.get(d, d) if isinstance(d, str) else _whole(f"input {name}", d) for d in dims)
    )


def _param(name: str, given: Any) -> Param:
    """From "int", "float", those with a default, or the default alone; numbers may be numpy's."""
    check_name(name)
    if _is_number(given):
        given = ("int", int(given)) if isinstance(given, Integral) else ("float", float(given))
    if isinstance(given, tuple) and len(given) != 2:
        raise TypeError(f"param `{name}` is {given!r}; expected a type, a default, or both in a pair")
    kind, default = given if isinstance(given, tuple) else (given, None)
    if kind not in ("int", "float"):
        raise DiagnosticError(mistakes.UnknownParamType(statement=f"param {name}", found=str(kind)))
    wanted = Type(kind)
    if _is_number(default):
        default = int(default) if isinstance(default, Integral) else float(default)
    return Param(name, wanted, _decimal(f"param {name}", default) if type(default) is int and wanted is Type.FLOAT else default)


class _Builder:
    """Expressions of one Python spec, from text or functions."""

    def __init__(self, head_dim: int, head_dim_v: int, inputs: list[Input], params: list[Param]) -> None:
        self.captures: dict[str, CapturedArray] = {}
        free = {d for i in inputs for d in i.dims if isinstance(d, str) and d not in SIZES}
        whole = {n: _int(n) for n in (*INDICES, *SIZES, *sorted(free))}
        whole |= {spelled: whole[meant] for spelled, meant in SPELLED.items()}
        self.globals: dict[str, Value] = {**whole, "s": S, "head_dim": constant(head_dim), "head_dim_v": constant(head_dim_v)}
        self.declared: dict[str, Value] = {}
        self.declared.update({i.name: i for i in inputs})
        self.declared.update({p.name: _named(p) for p in params})
        arrays = (_DeclaredInput(i) for i in inputs)
        self.known: dict[str, Any] = {a.name: a if a.shape else a.element() for a in arrays}
        self.known |= {p.name: Tracer(_named(p)) for p in params}
        self.sizes = {n: Tracer(whole[n]) for n in (*SIZES, *SPELLED, *sorted(free))}

    def expression(self, keyword: str, written: Any) -> Expr | None:
        if written is None:
            return None
        if isinstance(written, str):
            return self._text(keyword, written)
        if keyword != "mask" and _is_number(written):
            return constant(_decimal(keyword, written))
        if not callable(written):
            expected = {"mask": "text or a function", "scale": "a number or text"}.get(keyword, "text, a function or a number")
            raise TypeError(f"`{keyword}` is {written!r}; expected {expected}")
        arguments = {"s": S, **{i: _int(i) for i in INDICES}}
        return trace(written, keyword, arguments, self.known, self.sizes, self.captures)

    def _text(self, keyword: str, written: str) -> Expr:
        node = parse_expression(SourceFile(f"<{keyword}>", written))
        return Resolver(self.globals).expression(node, Scope(self.declared, prelude=prelude))


class _DeclaredInput(CapturedArray):
    """A declared input inside a traced function: it has dimensions but no array yet."""

    def __init__(self, declared: Input) -> None:
        super().__init__(declared.name, _Shape(declared.dims), declared.dtype.name)


class _Shape:
    def __init__(self, dims: tuple[int | str, ...]) -> None:
        self.shape = dims


def _int(text: str) -> Expr:
    return name(text, Type.INT)


def _named(param: Param) -> Expr:
    return name(param.name, param.type)
