"""One `attention` block -> its AttentionSpec. Statements may stand in any order; every mistake found is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language.names import SPELLED, check_name, near, nearest
from attngen.language.prelude import definition_of
from attngen.language.resolve import Definition, Faulty, Resolver, Scope, Value
from attngen.language.syntax import Node
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec, Input, Normalize, Param, Rung, S, Schedule
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES, STORAGE_DTYPES, DType
from attngen.spec.expr import Const, Expr, Type, constant, inputs_in, name, names_in
from attngen.spec.operators import apply

MAX_DECLARATIONS = 64
EXPRESSIONS = ("mask", "score", "scale", "sink")
DTYPES_ELSEWHERE = {
    "float16": "fp16", "half": "fp16", "f16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "f32": "fp32",
    "int": "int32", "long": "int64", "i32": "int32", "i64": "int64",
}  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A spec read from a text, and where each of its statements stands: "mask", "input slopes", "kernel", ...; "" is the
    name of the attention. `places` has the parts of its expressions, by statement."""

    spec: AttentionSpec
    source: SourceFile
    spans: dict[str, Span]
    places: dict[tuple[str, Expr], Node] = field(default_factory=dict, compare=False, repr=False)

    def span_of(self, statement: str, part: object = None) -> Span | None:
        """Where `part`, an Expr of `statement`, was written; else the statement itself, else the attention's name."""
        node = self.places.get((statement, part)) if isinstance(part, Expr) else None
        return node.span if node is not None else self.spans.get(statement) or self.spans.get("")


def declare(scope: Scope, seen: dict[str, Span], title: Node, value: Value) -> None:
    """Give `title` its meaning. Raises DiagnosticError for a name that is taken or cannot be used."""
    known = str(title.value)
    try:
        check_name(known, title.span)
    except DiagnosticError:
        scope.names.setdefault(known[:200], Faulty())
        raise
    if known in seen:
        taken_by = f"declared before in line {seen[known].line}"
        raise DiagnosticError(mistakes.DuplicateName(span=title.span, name=known, taken_by=taken_by))
    seen[known] = title.span
    scope.names[known] = value


def check_definition(node: Node) -> None:
    """Raise DiagnosticError where the parameters of a `def` cannot be told apart, or have names that cannot be used."""
    seen: dict[str, Span] = {}
    for parameter in node.children[1].children if len(node.children) == 3 else ():
        declare(Scope(), seen, parameter, Faulty())


def default_scale(head_dim: int) -> Expr:
    """1 / sqrt(head_dim) (Vaswani et al. 2017)."""
    return constant(float(max(head_dim, 1)) ** -0.5)


def as_float(expr: Expr) -> Expr:
    """`expr` as a float; truth values are left for the checker to refuse."""
    return apply("float", expr) if expr.type is Type.INT else expr


def find_dtype(found: str, known: tuple[DType, ...], of_what: str, statement: str, span: Span | None = None) -> DType:
    """The element type called `found`. Raises DiagnosticError."""
    dtype = DTYPES.get(found)
    if dtype is not None and dtype in known:
        return dtype
    names = [t.name for t in known]
    elsewhere = DTYPES_ELSEWHERE.get(found)
    close = elsewhere if elsewhere in names else nearest(found, names)
    hint = f"did you mean `{close}`?" if close else f"not an element type{of_what}"
    raise DiagnosticError(
        mistakes.UnknownDType(
            span=span, statement=statement, dtype=found, of_what=of_what, hint=hint, known=", ".join(names)
        )
    )


def common_names(head_dim: int, head_dim_v: int) -> dict[str, Value]:
    """What every expression of an attention may name: indices, sizes, the score, the head sizes."""
    known: dict[str, Value] = {n: name(n, Type.INT) for n in (*INDICES, *SIZES)}
    known |= {spelled: known[meant] for spelled, meant in SPELLED.items()}
    return known | {"s": S, "head_dim": constant(head_dim), "head_dim_v": constant(head_dim_v)}


class Block:
    """The statements of one block by keyword, and the mistakes found in them so far."""

    def __init__(self, source: SourceFile, node: Node, outer: Scope) -> None:
        self.source = source
        self.title, *self.statements = node.children
        self.scope = Scope(outer=outer)
        self.seen: dict[str, Span] = {}
        self.spans: dict[str, Span] = {"": self.title.span}
        self.places: dict[tuple[str, Expr], Node] = {}
        self.single: dict[str, Node] = {}
        self.declared: dict[str, list[Node]] = {"input": [], "param": [], "let": [], "define": []}
        self.problems: list[Diagnostic] = []

    def load(self) -> Loaded:
        """The checked spec. Raises DiagnosticError with every mistake found."""
        self._attempt(lambda: check_name(str(self.title.value), self.title.span))
        self._sort()
        given = self._statements()
        if self.problems:
            raise DiagnosticError(*self.problems)
        loaded = Loaded(AttentionSpec(**given), self.source, self.spans, self.places)
        try:
            check(loaded.spec)
        except DiagnosticError as error:
            raise error.located(loaded.span_of) from None
        return loaded

    def _attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` gives; None where it fails, its mistakes being noted."""
        try:
            return read()
        except DiagnosticError as error:
            self.problems += error.diagnostics
            return None

    def _sort(self) -> None:
        """Statements by keyword; those that declare names in order."""
        count = 0
        for node in self.statements:
            if node.kind in self.declared:
                count += 1
                if count > MAX_DECLARATIONS:
                    what = "declarations in one attention"
                    raise DiagnosticError(mistakes.TooManyNames(span=node.span, limit=MAX_DECLARATIONS, what=what))
                self.declared[node.kind].append(node)
            elif node.kind in self.single:
                line = self.single[node.kind].span.line
                repeated = mistakes.RepeatedMask if node.kind == "mask" else mistakes.RepeatedStatement
                self.problems.append(repeated(span=node.span, keyword=node.kind, line=line))
            else:
                self.single[node.kind] = node
                self.spans[node.kind] = node.children[0].span.to(node.children[-1].span)

    def _statements(self) -> dict[str, Any]:
        """Keyword arguments of the AttentionSpec; without meaning where there are problems."""
        dtype = self._attempt(self._dtype)
        sizes = self._attempt(self._head_dims) or (64, 64)
        heads = [n.value for n in self.single["heads"].children] if "heads" in self.single else [None, None]
        resolver = Resolver(common_names(*sizes))
        inputs, params = self._declarations(resolver)
        written = {keyword: self._attempt(lambda k=keyword: self._expression(resolver, k)) for keyword in EXPRESSIONS}
        mask, score, scale, sink = written.values()
        return {
            "name": str(self.title.value),
            "dtype": dtype,
            "head_dim": sizes[0],
            "head_dim_v": sizes[1],
            "q_heads": heads[0],
            "kv_heads": heads[1],
            "inputs": inputs,
            "params": params,
            "mask": mask,
            "score": S if score is None else as_float(score),
            "scale": default_scale(sizes[0]) if scale is None else as_float(scale),
            "sink": None if sink is None else as_float(sink),
            "normalize": self._attempt(self._normalize),
            "lse": self._attempt(self._lse),
            "schedule": self._attempt(self._schedule),
        }

    # --- statements of one word or number

    def _required(self, keyword: str, example: str) -> Node:
        if keyword not in self.single:
            raise DiagnosticError(
                mistakes.MissingStatement(span=self.title.span, name=self.title.value, keyword=keyword, example=example)
            )
        return self.single[keyword]

    def _dtype(self) -> DType:
        node = self._required("dtype", "dtype fp16").children[0]
        return find_dtype(node.value, STORAGE_DTYPES, " of Q, K and V", "dtype", node.span)

    def _head_dims(self) -> tuple[int, int]:
        nodes = self._required("head_dim", "head_dim 64").children
        return nodes[0].value, nodes[-1].value

    def _normalize(self) -> Normalize:
        if "normalize" not in self.single:
            return "softmax"
        node = self.single["normalize"].children[0]
        for known in get_args(Normalize):
            if node.value == known:
                chosen: Normalize = known
                return chosen
        hint = near(node.value, get_args(Normalize))
        raise DiagnosticError(mistakes.UnknownNormalize(span=node.span, found=node.value, hint=hint))

    def _lse(self) -> bool:
        if "output" not in self.single:
            return False
        node = self.single["output"].children[0]
        if node.value != "lse":
            raise DiagnosticError(mistakes.UnknownOutput(span=node.span, found=node.value))
        return True

    def _schedule(self) -> Schedule:
        if "kernel" not in self.single:
            return Schedule()
        rung, *options = self.single["kernel"].children
        if rung.value not in get_args(Rung):
            hint = near(rung.value, get_args(Rung))
            raise DiagnosticError(mistakes.UnknownRung(span=rung.span, found=rung.value, hint=hint))
        chosen: dict[str, Node] = {}
        for option in options:
            if option.kind in chosen:
                line = chosen[option.kind].span.line
                raise DiagnosticError(mistakes.RepeatedStatement(span=option.span, keyword=option.kind, line=line))
            chosen[option.kind] = option
            self.spans[f"kernel {option.kind}"] = option.span
        tile = [n.value for n in chosen["tile"].children] if "tile" in chosen else [None, None]
        stages, warps = (chosen[o].children[0].value if o in chosen else None for o in ("stages", "warps"))
        return Schedule(rung.value, tile[0], tile[1], stages, warps)

    # --- declarations

    def _declarations(self, resolver: Resolver) -> tuple[tuple[Input, ...], tuple[Param, ...]]:
        globals = dict(resolver.globals)
        resolver.globals = globals
        for node in (*self.declared["let"], *self.declared["define"]):
            self._attempt(lambda n=node: check_definition(n))  # type: ignore[misc]
            self._declare(node, definition_of(node, self.scope))
        kinds = {}
        for node in self.declared["param"]:
            title, kind = node.children[:2]
            if kind.value in ("int", "float"):
                kinds[title.value] = Type(kind.value)
            else:
                self.problems.append(mistakes.UnknownParamType(span=kind.span, found=kind.value))
            self._declare(node, name(title.value, kinds[title.value]) if title.value in kinds else Faulty())
        inputs = []
        for node in self.declared["input"]:
            declared = self._attempt(lambda n=node: self._input(n, globals))  # type: ignore[misc]
            self._declare(node, Faulty() if declared is None else declared)
            inputs += [declared] if declared is not None else []
        for node in self.declared["let"]:
            self._attempt(lambda n=node: self._let(n, resolver))  # type: ignore[misc]
        read = [self._attempt(lambda n=node: self._param(n, kinds, resolver)) for node in self.declared["param"]]  # type: ignore[misc]
        return tuple(inputs), tuple(p for p in read if p is not None)

    def _declare(self, node: Node, value: Value) -> None:
        title = node.children[0]
        keyword = "def" if node.kind == "define" else node.kind
        self.spans.setdefault(f"{keyword} {title.value}", title.span)
        self._attempt(lambda: declare(self.scope, self.seen, title, value))

    def _input(self, node: Node, globals: dict[str, Value]) -> Input:
        title, dtype, dims = node.children
        element = find_dtype(dtype.value, tuple(DTYPES.values()), " of an input", "input", dtype.span)
        declared = Input(str(title.value), element, tuple(self._dimension(d) for d in dims.children))
        for dim, at in zip(declared.dims, dims.children, strict=True):
            if isinstance(dim, str) and dim not in SIZES:
                if dim in self.seen:
                    taken_by = f"it is declared in line {self.seen[dim].line}; a dimension needs a name of its own"
                    raise DiagnosticError(mistakes.DuplicateName(span=at.span, name=dim, taken_by=taken_by))
                globals[dim] = name(dim, Type.INT)
        return declared

    def _dimension(self, node: Node) -> int | str:
        if node.kind == "INT":
            return int(node.value)
        text = SPELLED.get(node.value, str(node.value))
        if text in SIZES:
            return text
        close = nearest(text, (*SIZES, *SPELLED), 0.75)
        if close:
            raise DiagnosticError(mistakes.UnknownDimension(span=node.span, name=text, near=SPELLING.get(close, close)))
        check_name(text, node.span)
        return text

    def _let(self, node: Node, resolver: Resolver) -> None:
        title, body = node.children
        check_constant(title, body, resolver.expression(body, self.scope))

    def _param(self, node: Node, kinds: Mapping[str, Type], resolver: Resolver) -> Param | None:
        title, _, *default = node.children
        wanted = kinds.get(title.value)
        if wanted is None:
            return None
        if not default:
            return Param(str(title.value), wanted)
        value = resolver.expression(default[0], self.scope)
        if wanted is Type.FLOAT:
            value = as_float(value)
        self.spans[f"param {title.value} default"] = default[0].span
        if isinstance(value, Const) and value.type is wanted:
            return Param(str(title.value), wanted, value.value)
        found = str(value.type) if isinstance(value, Const) else "not a constant"
        raise DiagnosticError(
            mistakes.BadDefault(span=default[0].span, name=title.value, expected=str(wanted), found=found)
        )

    def _expression(self, resolver: Resolver, keyword: str) -> Expr | None:
        if keyword not in self.single:
            return None
        value = resolver.expression(self.single[keyword].children[0], self.scope)
        self.places |= {(keyword, part): node for part, node in resolver.places.items()}
        return value


SPELLING = {meant: spelled for spelled, meant in SPELLED.items()}


def check_constant(title: Node, body: Node, value: Expr) -> None:
    """Raise DiagnosticError where a `let` is not a constant."""
    uses = sorted(names_in(value) | inputs_in(value))
    if uses:
        shown = ", ".join(f"`{SPELLING.get(u, u)}`" for u in uses)
        raise DiagnosticError(mistakes.NotConstant(span=body.span, name=title.value, uses=shown))


__all__ = ["Block", "Definition", "Loaded"]
