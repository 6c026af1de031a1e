"""One `attention` block: its statements -> a checked AttentionSpec, with the source position of every statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar, get_args

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.keywords import ScheduleName
from attngen.language.places import Places, unused_definitions
from attngen.language.resolve import Definition, Resolver, Scope, Value, definition_of, number_of
from attngen.language.syntax import Node
from attngen.language.words import allowed, dtype_named, dtypes_of_tensors, one_of
from attngen.source import SourceFile, Span
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
from attngen.spec.check import check, with_scaled_keys
from attngen.spec.dropout import or_none, with_state
from attngen.spec.dtypes import INPUT_DTYPES, STORAGE_DTYPES
from attngen.spec.expr import Const, Expr, Type, constant, inputs_in, name, names_in
from attngen.spec.mistakes import Suspicion
from attngen.spec.names import SPELLED, check_name
from attngen.spec.operator import apply
from attngen.spec.rotary import Pairs, Rotary
from attngen.spec.scales import default_scale
from attngen.spec.suspicions import suspicions

MAX_DECLARATIONS = 64
WORDS = {"storage": (Storage, mistakes.UnknownStorage), "q": (QPlace, mistakes.UnknownQPlace)}  # in a `kernel` statement
REPEATED = ("input", "param", "let", "define")
TENSORS = {"scaled": ("k", "v"), "values": ("k",)}  # the tensors that a statement may name
EXPRESSIONS = ("mask", "score", "scale", "sink", "dropout", "scaled k", "scaled v")

P = ParamSpec("P")
T = TypeVar("T")
Fields = dict[str, Any]  # fields of an AttentionSpec, or of a part of it, by name


@dataclass(frozen=True, slots=True)
class Loaded:
    """A spec read from a text, and the spans of its statements ("mask", "input slopes", "kernel", ...)."""

    spec: AttentionSpec
    source: SourceFile
    spans: dict[str, Span]
    unused: tuple[Diagnostic, ...] = ()  # definitions that no statement reads
    places: Callable[[str, Expr], Span | None] = field(default=lambda statement, expr: None, compare=False, repr=False)

    def suspicions(self) -> tuple[Diagnostic, ...]:
        """The warnings about the spec, except those that it allows, at their positions in the text."""
        unused = (found for found in self.unused if found.code not in self.spec.allow)
        return (*map(self._located, suspicions(self.spec)), *unused)

    def _located(self, found: Suspicion) -> Diagnostic:
        """`found` at the part of its statement that it is about."""
        span = None if found.statement is None or found.expr is None else self.places(found.statement, found.expr)
        return found.located(self.spans) if span is None else replace(found, span=span)


def declare(scope: Scope, seen: dict[str, Span], node: Node, value: Value | None = None) -> None:
    """Enters the name that `node` declares into `scope`, with `value` or the function of a `def`. Raises DiagnosticError."""
    title = node.children[0]
    known = str(title.value)
    check_name(known, title.span)
    if node.kind == "define":
        _check_parameters(node)
    if known in seen:
        raise DiagnosticError(
            mistakes.DuplicateName(span=title.span, name=known, taken_by=f"first declared in line {seen[known].line}")
        )
    seen[known] = title.span
    scope.names[known] = definition_of(node, scope) if value is None else value


def _check_parameters(node: Node) -> None:
    parameters = node.children[1].children if len(node.children) > 2 else ()
    for position, parameter in enumerate(parameters):
        check_name(str(parameter.value), parameter.span)
        if any(parameter.value == earlier.value for earlier in parameters[:position]):
            raise DiagnosticError(
                mistakes.DuplicateName(span=parameter.span, name=parameter.value, taken_by="another parameter has this name")
            )


class Block:
    """One `attention` block. Mistakes are collected; those that follow from others are left out."""

    def __init__(self, source: SourceFile, node: Node, outer: Scope) -> None:
        self.source = source
        self.title, *self.statements = node.children
        self.scope = Scope(outer=outer)
        self.seen: dict[str, Span] = {}
        self.spans: dict[str, Span] = {}
        self.single: dict[str, Node] = {}
        self.inputs: list[Input] = []
        self.params: list[Param] = []
        self.globals: dict[str, Value] = {}
        self.problems: list[Diagnostic] = []
        self.failed: set[str] = set()  # names declared with a mistake

    def load(self) -> Loaded:
        """Raises DiagnosticError."""
        self._sort()
        dtypes = self._attempt(self._dtypes)
        sizes = self._attempt(self._required, "head_dim", "head_dim 64")
        head_dim, head_dim_v = (64, 64) if sizes is None else (sizes.children[0].value, sizes.children[-1].value)
        values = tuple(node.value for node in self.single["values"].children[1:]) if "values" in self.single else None
        if values is not None and (sizes is None or len(sizes.children) == 1):
            head_dim_v = values[1] - values[0]
        heads = [n.value for n in self.single["heads"].children] if "heads" in self.single else [None, None]
        self._globals(head_dim, head_dim_v)
        self._lets()
        given = {keyword: self._attempt(self._expression, keyword) for keyword in EXPRESSIONS}
        rotary = self._attempt(self._rotary)
        normalize = self._attempt(self._one_of, "normalize", get_args(Normalize), mistakes.UnknownNormalize)
        precision = self._attempt(self._one_of, "precision", get_args(Precision), mistakes.UnknownPrecision)
        lse = self._attempt(self._lse)
        schedule = self._attempt(self._schedule)
        allow = self._attempt(self._allow)
        self._raise_problems()
        assert dtypes is not None
        try:
            expressions = completed(given, head_dim)
        except DiagnosticError as error:
            raise error.located(self.spans) from None
        spec = AttentionSpec(
            name=str(self.title.value),
            **with_type_of_values(dtypes, values),
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            values=values,
            q_heads=heads[0],
            kv_heads=heads[-1],
            inputs=with_state(tuple(self.inputs), expressions["dropout"]),
            params=tuple(self.params),
            **expressions,
            rotary=rotary,
            normalize=normalize or "softmax",
            lse=bool(lse),
            precision=precision or "highest",
            kernel=schedule or KernelRequest(),
            allow=allow or (),
        )
        try:
            check(spec)
        except DiagnosticError as error:
            raise error.located(self.spans | {"": self.title.span}) from None
        return Loaded(spec, self.source, self.spans, self._unused(), Places(self.single, Resolver(self.globals), self.scope))

    def _unused(self) -> tuple[Diagnostic, ...]:
        declared = [node for node in self.statements if node.kind in ("let", "define")]
        return unused_definitions(declared, self.scope)

    def _attempt(self, step: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """The result of `step`; None if it has mistakes, which are kept for `_raise_problems`."""
        try:
            return step(*args, **named)
        except DiagnosticError as error:
            self.problems += error.diagnostics
            return None

    def _raise_problems(self) -> None:
        """Raises DiagnosticError with the mistakes so far, except uses of names that were declared with a mistake."""
        if self.problems:
            unknown = (mistakes.UnknownName, mistakes.NotAnInput, mistakes.NotAFunction)
            used: dict[Diagnostic, str] = {p: p.name for p in self.problems if isinstance(p, unknown)}
            used |= {p: p.found for p in self.problems if isinstance(p, mistakes.ForeignSpelling)}
            raise DiagnosticError(*(p for p in dict.fromkeys(self.problems) if used.get(p, "") not in self.failed))

    def _sort(self) -> None:
        """Sorts statements by keyword, and declarations in their order."""
        declarations = [node for node in self.statements if node.kind in REPEATED]
        if len(declarations) > MAX_DECLARATIONS:
            span = declarations[MAX_DECLARATIONS].span
            what = "declarations in one attention"
            raise DiagnosticError(mistakes.TooManyNames(span=span, limit=MAX_DECLARATIONS, what=what))
        for node in self.statements:
            self._attempt(self._declaration if node.kind in REPEATED else self._single, node)

    def _single(self, node: Node) -> None:
        tensor = node.children[0]
        if node.kind in TENSORS:
            one_of(tensor.value, TENSORS[node.kind], mistakes.NotThatTensor, span=tensor.span)
        keyword = f"scaled {tensor.value}" if node.kind == "scaled" else node.kind
        if keyword in self.single:
            line = self.single[keyword].span.line
            raise DiagnosticError(mistakes.DuplicateStatement(span=node.span, keyword=keyword, line=line))
        self.single[keyword] = node
        self.spans[keyword] = _operands(node)
        self.spans |= {f"{keyword}:{part}": span for part, span in _parts(node)}

    def _declaration(self, node: Node) -> None:
        title = node.children[0]
        try:
            self._declare(node, title)
        except DiagnosticError:
            self.failed.add(str(title.value))
            raise

    def _declare(self, node: Node, title: Node) -> None:
        match node.kind:
            case "input":
                declared = self._input(node)
                self.inputs.append(declared)
                self.spans[f"input {declared.name}"] = title.span
                self.spans |= {f"input {declared.name}:{dim.value}": dim.span for dim in node.children[2].children}
                declare(self.scope, self.seen, node, declared)
            case "param":
                declare(self.scope, self.seen, node, constant(0))
                self.spans[f"param {title.value}"] = title.span
                self.spans |= {f"param {title.value}:default": default.span for default in node.children[2:]}
            case "let":
                declare(self.scope, self.seen, node, Definition(str(title.value), (), node.children[1], self.scope))
            case "define":
                declare(self.scope, self.seen, node)

    def _input(self, node: Node) -> Input:
        title, dtype, dims = node.children
        element = dtype_named(dtype.value, INPUT_DTYPES, "an input", span=dtype.span)
        return Input(str(title.value), element, tuple(self._dimension(d) for d in dims.children))

    def _dimension(self, node: Node) -> int | str:
        if isinstance(node.value, int):
            return node.value
        text = SPELLED.get(str(node.value), str(node.value))
        if text in SIZES:
            return text
        near = get_close_matches(text, [*SIZES, *SPELLED], 1, 0.8)
        if near:
            raise DiagnosticError(mistakes.UnknownDimension(span=node.span, name=text, near=near[0]))
        check_name(text, node.span)
        return text

    def _dtypes(self) -> Fields:
        """The element type of all tensors, or of each."""
        statement = self._required("dtype", "dtype fp16")
        first = statement.children[0]
        if first.kind != "typed":
            return {"dtype": dtype_named(first.value, STORAGE_DTYPES, "Q, K and V", span=first.span)}
        words: dict[str, Node] = {}
        for node in statement.children:
            tensor, word = node.children
            if tensor.value in words:
                raise DiagnosticError(
                    mistakes.DuplicateStatement(
                        span=node.span, keyword=f"dtype {tensor.value}", line=words[tensor.value].span.line
                    )
                )
            words[tensor.value] = word
        if "q" not in words:
            raise DiagnosticError(
                mistakes.MissingStatement(
                    span=statement.span, name=self.title.value, keyword="dtype q", example="q fp16 to this statement"
                )
            )
        return dtypes_of_tensors({t: node.value for t, node in words.items()}, lambda t: {"span": words[t].span})

    def _required(self, keyword: str, example: str) -> Node:
        if keyword not in self.single:
            raise DiagnosticError(
                mistakes.MissingStatement(span=self.title.span, name=self.title.value, keyword=keyword, example=example)
            )
        return self.single[keyword]

    def _globals(self, head_dim: int, head_dim_v: int) -> None:
        self.globals |= {n: name(n, Type.INT) for n in (*INDICES, *SIZES)}
        self.globals |= {spelled: self.globals[meant] for spelled, meant in SPELLED.items()}
        self.globals |= {"s": S, "head_dim": constant(head_dim), "head_dim_v": constant(head_dim_v)}
        for declared in self.inputs:
            for dim in declared.dims:
                if isinstance(dim, str) and dim not in SIZES:
                    if dim in self.scope.names:
                        span = self.spans[f"input {declared.name}"]
                        taken_by = "it is a dimension and something else as well"
                        self.problems.append(mistakes.DuplicateName(span=span, name=dim, taken_by=taken_by))
                    self.globals[dim] = name(dim, Type.INT)
        for node in self.statements:
            param = self._attempt(self._param, node) if node.kind == "param" else None
            if param is not None:
                self.params.append(param)
                self.scope.names[param.name] = name(param.name, param.type)

    def _param(self, node: Node) -> Param:
        title, kind, *default = node.children
        if kind.value not in ("int", "float"):
            raise DiagnosticError(mistakes.UnknownParamType(span=kind.span, found=kind.value))
        wanted = Type(kind.value)
        if not default:
            return Param(str(title.value), wanted)
        value = Resolver(self.globals).expression(default[0], Scope(outer=self.scope.outer))
        if wanted is Type.FLOAT and value.type is Type.INT:
            value = as_float(value)
        if not isinstance(value, Const) or value.type is not wanted:
            found = f"a {value.type}" if isinstance(value, Const) else "not a constant"
            raise DiagnosticError(
                mistakes.BadDefault(span=default[0].span, name=title.value, expected=str(wanted), found=found)
            )
        return Param(str(title.value), wanted, value.value)

    def _lets(self) -> None:
        for node in self.statements:
            if node.kind == "let":
                self._attempt(self._let, *node.children)

    def _let(self, title: Node, body: Node) -> None:
        value = Resolver(self.globals).expression(body, self.scope)
        uses = names_in(value) | inputs_in(value)
        if uses:
            raise DiagnosticError(mistakes.NotConstant(span=body.span, name=title.value, uses=", ".join(sorted(uses))))
        self.scope.names[str(title.value)] = value

    def _expression(self, keyword: str) -> Expr | None:
        if keyword not in self.single:
            return None
        return Resolver(self.globals, number_of(keyword)).expression(self.single[keyword].children[-1], self.scope)

    def _rotary(self) -> Rotary | None:
        if "rotary" not in self.single:
            return None
        return rotary_of(self.single["rotary"].children[0], Resolver(self.globals), self.scope)

    def _one_of(self, keyword: str, known: tuple[str, ...], mistake: Callable[..., Diagnostic]) -> Any:
        """The word of a statement, one of `known`; by default the first."""
        if keyword not in self.single:
            return known[0]
        node = self.single[keyword].children[0]
        return one_of(node.value, known, mistake, span=node.span)

    def _lse(self) -> bool:
        if "output" not in self.single:
            return False
        node = self.single["output"].children[0]
        if node.value != "lse":
            raise DiagnosticError(mistakes.UnknownOutput(span=node.span, found=node.value))
        return True

    def _allow(self) -> tuple[str, ...]:
        words = self.single["allow"].children if "allow" in self.single else ()
        return allowed(*((word.value, {"span": word.span}) for word in words))

    def _schedule(self) -> KernelRequest:
        if "kernel" not in self.single:
            return KernelRequest()
        schedule, *options = self.single["kernel"].children
        one_of(schedule.value, get_args(ScheduleName), mistakes.UnknownSchedule, span=schedule.span)
        chosen: Fields = {}
        for keyword, value, node in _options(options):
            if keyword in chosen:
                raise DiagnosticError(mistakes.DuplicateStatement(span=node.span, keyword=node.kind, line=node.span.line))
            if keyword in WORDS:
                known, mistake = WORDS[keyword]
                one_of(value, get_args(known), mistake, span=node.children[0].span)
            chosen[keyword] = value
        return KernelRequest(schedule=schedule.value, **chosen)


def _options(nodes: list[Node]) -> Iterator[tuple[str, object, Node]]:
    for node in nodes:
        values = [c.value for c in node.children]
        if node.kind == "tile":
            yield "block_q", values[0], node
            yield "block_kv", values[1], node
        else:
            yield node.kind, values[0] if values else True, node


def _operands(node: Node) -> Span:
    """The span of a statement without its keyword."""
    if not node.children:
        return node.span
    return node.children[0].span.to(node.children[-1].span)


def _parts(node: Node) -> Iterator[tuple[str, Span]]:
    """The parts of a statement that a mistake may point at: names and inputs of its expressions, the second of two numbers."""
    if node.kind in ("heads", "head_dim"):
        yield "second", node.children[-1].span
    if node.kind == "rotary":
        dim, _, *tables = node.children[0].children[:4]
        yield from (("dim", dim.span), *((str(table.value), table.span) for table in tables))
    found: dict[str, Span] = {}
    stack = list(reversed(node.children))
    while stack:
        part = stack.pop()
        if part.kind in ("name", "index"):
            found.setdefault(SPELLED.get(part.children[0].value, part.children[0].value), part.span)
        stack.extend(reversed(part.children))
    yield from found.items()


def rotary_of(node: Node, resolver: Resolver, scope: Scope) -> Rotary:
    """The operands of a `rotary` statement. Raises DiagnosticError."""
    dim, pairs, cosines, sines, *positions = node.children
    one_of(pairs.value, get_args(Pairs), mistakes.UnknownPairs, span=pairs.span)
    given = (resolver.expression(position, scope) for position in positions)
    return Rotary(dim.value, pairs.value, str(cosines.value), str(sines.value), *given)


def with_type_of_values(dtypes: Fields, values: tuple[int, ...] | None) -> Fields:
    """The fields for element types: values that are a part of K have its type, unless another one is stated."""
    stated = values is None or dtypes.get("v_dtype") is not None
    return dtypes if stated else dtypes | {"v_dtype": dtypes.get("k_dtype")}


def as_float(expr: Expr) -> Expr:
    """`expr` as a float; truth values stay, and the checker refuses them."""
    return apply("float", expr) if expr.type is Type.INT else expr


def completed(written: Mapping[str, Expr | None], head_dim: int) -> Fields:
    """The fields of an AttentionSpec for the expressions of these keywords. The default scale is 1 / sqrt(head_dim) (Vaswani et
    al. 2017). Raises DiagnosticError for a scale of K that is none."""
    keywords = ("score", "scale", "sink", "dropout", "scaled k", "scaled v")
    score, scale, sink, dropout, of_k, of_v = (None if e is None else as_float(e) for e in map(written.get, keywords))
    usual = constant(default_scale(head_dim))
    score = with_scaled_keys(score or S, of_k)
    expressions = {"mask": written["mask"], "score": score, "scale": scale or usual, "sink": sink, "v_scale": of_v}
    return expressions | {"dropout": or_none(dropout)}
