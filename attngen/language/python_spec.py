"""The Python spec: keyword arguments, masks and scores as text or as plain Python functions -> the same AttentionSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from operator import index
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, get_args

from attngen.diagnostics import DiagnosticError, refuse_keywords, warn
from attngen.keywords import ScheduleName
from attngen.language.block import Fields, completed, rotary_of, with_type_of_values
from attngen.language.prelude import prelude
from attngen.language.resolve import Resolver, Scope, Value, number_of
from attngen.language.syntax import parse_expression, parse_rotation
from attngen.language.trace import CapturedArray, Tracer, trace
from attngen.language.words import allowed, dtype_named, dtypes_of_tensors, one_of
from attngen.source import SourceFile
from attngen.spec import mistakes
from attngen.spec.attention import (
    INDICES,
    SIZES,
    AttentionSpec,
    Input,
    KernelRequest,
    Normalize,
    Param,
    Precision,
    QPlace,
    S,
    Storage,
)
from attngen.spec.check import check, magnitude
from attngen.spec.dropout import with_state
from attngen.spec.dtypes import DTYPES, DTYPES_OF, INPUT_DTYPES, STORAGE_DTYPES
from attngen.spec.expr import MAX_FLOAT_TEXT, Expr, Type, constant, inputs_in, name
from attngen.spec.names import SPELLED, check_name
from attngen.spec.rotary import Rotary
from attngen.spec.suspicions import suspicions

Written = str | Callable[..., object] | Expr | None


P = ParamSpec("P")
R = TypeVar("R")


def _named_keywords(function: Callable[P, R], name: str) -> Callable[P, R]:
    """`function` under `name`, with keywords only. An unknown keyword is refused with a suggestion."""
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
    dtype: str | Mapping[str, str] = "fp16",
    head_dim: int = 64,
    head_dim_v: int | None = None,
    values: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    mask: Written = None,
    score: Written = None,
    scale: float | str | None = None,
    sink: Written | float = None,
    dropout: float | str | None = None,
    rotary: str | None = None,
    k_scale: Written | float = None,
    v_scale: Written | float = None,
    inputs: Mapping[str, tuple[str, tuple[int | str, ...]]] | None = None,
    params: Mapping[str, object] | None = None,
    normalize: Normalize = "softmax",
    lse: bool = False,
    precision: Precision = "highest",
    kernel: ScheduleName = "auto",
    tile: tuple[int, int] | None = None,
    stages: int | None = None,
    warps: int | None = None,
    storage: Storage = "dense",
    batch_invariant: bool = False,
    q: QPlace | None = None,
    page_size: int | None = None,
    allow: str | Sequence[str] = (),
) -> tuple[AttentionSpec, dict[str, Any]]:
    """An AttentionSpec, and the arrays that functions captured, by name. `traced` returns the pair, `define` the spec.

    `dtype` is the element type of Q, K, V and O, or a mapping: of "q", and of some of "k", "v" and "o", which otherwise have
    that of Q. `values` (begin, end) says that V is k[..., begin:end]. `heads` is (query heads, key/value heads); `inputs` maps
    names to (dtype, dims); `params` maps names to "int", "float", (type, default), or a default alone. `mask`, `score` and
    `sink` are text of the language, expressions, or functions: (s, b, h, q, k) or, without s, (b, h, q, k). `k_scale` and
    `v_scale`, which stored keys and values are multiplied with, are such functions too, or of (b, h, k), or numbers. `rotary`
    is the text of the statement, as "64 halves by cosines, sines". Arrays that a function refers to are captured with their
    present sizes, also dimensions that are indexed by b, h, q or k. Raises DiagnosticError as for text, TraceError if a
    function cannot be expressed, TypeError for an argument of a wrong type. Issues a SpecWarning for what is unlikely to be
    meant, except the warnings whose codes `allow` has, as "W205" or ("W205", "W207").
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` is {name!r}; expected a str")
    check_name(name, title=True)
    head_dim = _whole("head_dim", head_dim)
    begin, end = _pair("values", values)
    values = None if begin is None or end is None else (begin, end)
    if head_dim_v is None:
        head_dim_v = head_dim if values is None else values[1] - values[0]
    head_dim_v = _whole("head_dim_v", head_dim_v)
    q_heads, kv_heads = _pair("heads", heads)
    block_q, block_kv = _pair("tile", tile)
    counts = (("stages", stages), ("warps", warps), ("page_size", page_size))
    stages, warps, page_size = (None if n is None else _whole(of, n) for of, n in counts)
    for keyword, flag in (("lse", lse), ("batch_invariant", batch_invariant)):
        if not isinstance(flag, bool):
            raise TypeError(f"`{keyword}` is {flag!r}; expected True or False")
    for keyword, given in (("scale", scale), ("dropout", dropout)):
        if isinstance(given, bool):
            raise TypeError(f"`{keyword}` is {given!r}; expected a number")
    dtypes = _dtypes(dtype)
    declared = [_input(n, given) for n, given in _items("inputs", inputs)]
    numbers = [_param(n, given) for n, given in _items("params", params)]
    builder = _Builder(head_dim, head_dim_v, declared, numbers)
    written = (("mask", mask), ("score", score), ("sink", sink), ("scale", scale), ("dropout", dropout))
    exprs = {keyword: builder.expression(keyword, given) for keyword, given in written}
    exprs |= {f"scaled {t}": builder.expression(f"{t}_scale", given) for t, given in (("k", k_scale), ("v", v_scale))}
    used = inputs_in(*(expr for expr in exprs.values() if expr is not None))
    rotation = builder.rotary(rotary)
    captures = {name: c for name, c in builder.captures.items() if name in used}  # not if only its length or dtype is used
    captured = [Input(n, DTYPES[str(c.dtype_name)], tuple(map(int, c.array.shape))) for n, c in captures.items()]
    one_of(kernel, get_args(ScheduleName), mistakes.UnknownSchedule, statement="kernel")
    one_of(storage, get_args(Storage), mistakes.UnknownStorage, statement="kernel")
    if q is not None:
        one_of(q, get_args(QPlace), mistakes.UnknownQPlace, statement="kernel")
    expressions = completed(exprs, head_dim)
    result = AttentionSpec(
        name=name,
        **with_type_of_values(dtypes, values),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        values=values,
        q_heads=q_heads,
        kv_heads=kv_heads,
        inputs=with_state((*declared, *captured), expressions["dropout"]),
        params=tuple(numbers),
        **expressions,
        rotary=rotation,
        normalize=normalize,
        lse=lse,
        precision=precision,
        kernel=KernelRequest(kernel, block_q, block_kv, stages, warps, storage, batch_invariant, q, page_size),
        allow=_allowed(allow),
    )
    check(result)
    warn(suspicions(result, [keyword for keyword, given in written if callable(given)]))
    return result, {n: c.array for n, c in captures.items()}


def _first(describe: Callable[P, tuple[AttentionSpec, object]]) -> Callable[P, AttentionSpec]:
    @wraps(describe)
    def spec_alone(*args: P.args, **keywords: P.kwargs) -> AttentionSpec:
        return describe(*args, **keywords)[0]

    spec_alone.__signature__ = signature(describe).replace(return_annotation="AttentionSpec")  # type: ignore[attr-defined]
    return spec_alone


traced = _named_keywords(_describe, "traced")
define = _named_keywords(_first(_describe), "define")


def _dtypes(given: object) -> Fields:
    """The element type of all tensors, or, by their names, of Q and of others that have one of their own."""
    if not isinstance(given, Mapping):
        return {"dtype": dtype_named(given, STORAGE_DTYPES, "Q, K and V", statement="dtype")}
    if "q" not in given or not {*given} <= {*DTYPES_OF}:
        raise TypeError(f'`dtype` is {given!r}; expected the element types of "q" and of some of "k", "v" and "o"')
    return dtypes_of_tensors(given, lambda tensor: {"statement": "dtype"})


def _allowed(given: object) -> tuple[str, ...]:
    """The codes of the warnings that the spec allows."""
    if not isinstance(given, str | list | tuple):
        raise TypeError(f'`allow` is {given!r}; expected the codes of warnings, as "W205" or ("W205", "W207")')
    words = (given,) if isinstance(given, str) else given
    return allowed(*((word, {"statement": "allow"}) for word in words))


def _is_number(given: object) -> bool:
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


def _whole(keyword: str, given: object) -> int:
    """A whole number, numpy's too."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"`{keyword}` is {given!r}; expected a whole number")
    return index(given)


def _pair(keyword: str, given: object) -> tuple[int, int] | tuple[None, None]:
    if given is None:
        return None, None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"`{keyword}` is {given!r}; expected two whole numbers, as in {keyword}=(8, 8)")
    return _whole(keyword, given[0]), _whole(keyword, given[1])


def _items(keyword: str, given: Any) -> list[tuple[str, Any]]:
    """The items of a mapping from names. Raises TypeError."""
    if not isinstance(given or {}, Mapping):
        raise TypeError(f"`{keyword}` is {given!r}; expected a mapping from names")
    for key in given or {}:
        if not isinstance(key, str):
            raise TypeError(f"`{keyword}` has the key {key!r}; expected a name")
    return list((given or {}).items())


def _input(name: str, given: object) -> Input:
    """The input for (element type, dimensions)."""
    check_name(name)
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], tuple | list):
        raise TypeError(f'input `{name}` is {given!r}; expected (element type, dimensions), as ("fp32", ("heads",))')
    dtype, dims = given
    element = dtype_named(dtype, INPUT_DTYPES, "an input", statement=f"input {name}")
    return Input(name, element, tuple(SPELLED.get(d, d) if isinstance(d, str) else _whole(f"input {name}", d) for d in dims))


def _param(name: str, given: Any) -> Param:
    """The param for "int", "float", (type, default), or a default alone; numbers may be numpy's."""
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
    """The expressions of one Python spec, from text or functions."""

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
        self.known: dict[str, object] = {a.name: a if a.shape else a.element() for a in arrays}
        self.known |= {p.name: Tracer(_named(p)) for p in params}
        self.sizes = {n: Tracer(whole[n]) for n in (*SIZES, *SPELLED, *sorted(free))}

    def expression(self, keyword: str, written: object) -> Expr | None:
        if written is None:
            return None
        if isinstance(written, str):
            return self._text(keyword, written)
        if keyword != "mask" and _is_number(written):
            return constant(_decimal(keyword, written))
        if isinstance(written, Expr):
            return written
        if not callable(written):
            number = dict.fromkeys(("scale", "dropout"), "a number or text")
            expected = {"mask": "text or a function", **number}.get(keyword, "text, a function or a number")
            raise TypeError(f"`{keyword}` is {written!r}; expected {expected}")
        return self._traced(keyword, written)

    def _traced(self, keyword: str, function: Callable[..., object]) -> Expr:
        arguments = {"s": S, **{i: _int(i) for i in INDICES}}
        return trace(function, keyword, arguments, self.known, self.sizes, self.captures)

    def rotary(self, written: str | None) -> Rotary | None:
        if not isinstance(written, str | None):
            raise TypeError(f'`rotary` is {written!r}; expected text, as "64 halves by cosines, sines"')
        if written is None:
            return None
        return rotary_of(parse_rotation(SourceFile("<rotary>", written)), *self._resolver())

    def _text(self, keyword: str, written: str) -> Expr:
        resolver, scope = self._resolver()
        resolver.number = number_of(keyword)
        return resolver.expression(parse_expression(SourceFile(f"<{keyword}>", written)), scope)

    def _resolver(self) -> tuple[Resolver, Scope]:
        return Resolver(self.globals), Scope(self.declared, prelude=prelude)


class _DeclaredInput(CapturedArray):
    """A declared input inside a traced function: it has dimensions, but no array."""

    def __init__(self, declared: Input) -> None:
        super().__init__(declared.name, SimpleNamespace(shape=declared.dims), declared.dtype.name)


def _int(text: str) -> Expr:
    return name(text, Type.INT)


def _named(param: Param) -> Expr:
    return name(param.name, param.type)
