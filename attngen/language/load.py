"""Syntax tree -> checked AttentionSpecs, with the place of every statement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import get_args

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language.prelude import definition_of, prelude
from attngen.language.resolve import CONSTANTS, Definition, Resolver, Scope, Value
from attngen.language.syntax import Node, parse
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.attention import INDICES, SIZES, AttentionSpec, Input, Normalize, Param, Rung, S, Schedule
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES, STORAGE_DTYPES, DType
from attngen.spec.expr import Const, Expr, Type, constant, inputs_in, name, names_in
from attngen.spec.operators import FUNCTIONS, apply

MAX_NAME = 64
MAX_DECLARATIONS = 64
MAX_ATTENTIONS = 256
SPELLED = {"heads": "q_heads"}
REPEATED = ("input", "param", "let", "define")
RESERVED_WORDS = frozenset(
    [
        "alignas",
        "alignof",
        "and",
        "and_eq",
        "asm",
        "auto",
        "bitand",
        "bitor",
        "bool",
        "break",
        "case",
        "catch",
        "char",
        "class",
        "compl",
        "const",
        "constexpr",
        "const_cast",
        "continue",
        "decltype",
        "default",
        "delete",
        "do",
        "double",
        "dynamic_cast",
        "else",
        "enum",
        "explicit",
        "export",
        "extern",
        "false",
        "float",
        "for",
        "friend",
        "goto",
        "if",
        "inline",
        "int",
        "long",
        "mutable",
        "namespace",
        "new",
        "noexcept",
        "not",
        "not_eq",
        "nullptr",
        "operator",
        "or",
        "or_eq",
        "private",
        "protected",
        "public",
        "register",
        "reinterpret_cast",
        "return",
        "short",
        "signed",
        "sizeof",
        "static",
        "static_assert",
        "static_cast",
        "struct",
        "switch",
        "template",
        "this",
        "thread_local",
        "throw",
        "true",
        "try",
        "typedef",
        "typeid",
        "typename",
        "union",
        "unsigned",
        "using",
        "virtual",
        "void",
        "volatile",
        "wchar_t",
        "while",
        "xor",
        "xor_eq",
        "in",
        "main",
    ]
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A spec read from a text, and where each of its statements stands ("mask", "input slopes", "kernel", ...)."""

    spec: AttentionSpec
    source: SourceFile
    spans: dict[str, Span]


def load_source(source: SourceFile) -> tuple[Loaded, ...]:
    """Every attention of a text. Raises DiagnosticError with the mistakes found."""
    items = parse(source)
    scope = Scope(fallback=lambda n: prelude().get(n))
    seen: dict[str, Span] = {}
    for item in items:
        if item.kind == "define":
            _declare(scope, seen, item, definition_of(item, scope))
    blocks = [item for item in items if item.kind == "attention"]
    if not blocks:
        raise DiagnosticError(mistakes.NoAttention(span=Span(source, 1, 1, 1, 2)))
    if len(blocks) > MAX_ATTENTIONS:
        raise DiagnosticError(mistakes.TooManyNames(span=blocks[0].span, limit=MAX_ATTENTIONS, what="attentions"))
    loaded: dict[str, Loaded] = {}
    problems: list[Diagnostic] = []
    for block in blocks:
        title = block.children[0]
        try:
            _check_name(title)
            if title.value in loaded:
                raise DiagnosticError(mistakes.DuplicateAttention(span=title.span, name=title.value))
            loaded[title.value] = _Block(source, block, scope).load()
        except DiagnosticError as error:
            problems += error.diagnostics
    if problems:
        raise DiagnosticError(*problems)
    return tuple(loaded.values())


def load_text(text: str, filename: str = "<text>") -> tuple[AttentionSpec, ...]:
    """The specs of a text. Raises DiagnosticError."""
    return tuple(one.spec for one in load_source(SourceFile(filename, text)))


def load_path(path: str | PathLike[str]) -> tuple[Loaded, ...]:
    """`load_source` of a file. Raises DiagnosticError for what it says, OSError where it cannot be read."""
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        source = SourceFile(str(path), data[: error.start].decode("utf-8", "replace"))
        line = source.text.count("\n") + 1
        column = len(source.text.rsplit("\n", 1)[-1]) + 1
        raise DiagnosticError(
            mistakes.NotAText(span=Span(source, line, column, line, column + 1), position=error.start)
        ) from None
    return load_source(SourceFile(str(path), text.replace("\r\n", "\n")))


def load_file(path: str | PathLike[str]) -> tuple[AttentionSpec, ...]:
    """The specs of an `.attn` file. Raises DiagnosticError for what it says, OSError where it cannot be read."""
    return tuple(one.spec for one in load_path(path))


def _declare(scope: Scope, seen: dict[str, Span], node: Node, value: Value) -> None:
    title = node.children[0]
    _check_name(title)
    known = str(title.value)
    if known in seen:
        raise DiagnosticError(
            mistakes.DuplicateName(span=title.span, name=known, taken_by=f"declared before in line {seen[known].line}")
        )
    seen[known] = title.span
    scope.names[known] = value


def check_name(text: str, span: Span | None = None) -> None:
    """Raise DiagnosticError for a name that generated code, or a reader, could take for something else."""
    if len(text) > MAX_NAME:
        raise DiagnosticError(mistakes.NameTooLong(span=span, length=len(text), limit=MAX_NAME))
    reason = ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        reason = "names are letters, digits and underscores"
    elif text in (*INDICES, "s", *SIZES, *SPELLED, "head_dim", "head_dim_v", *CONSTANTS):
        reason = "it has a meaning in every expression"
    elif text in FUNCTIONS:
        reason = "it is a function"
    elif text in RESERVED_WORDS:
        reason = "it is a word of C++, into which the spec is translated"
    elif text.startswith("_") or "__" in text:
        reason = "C++ reserves names that begin with an underscore or hold two"
    if reason:
        suggestion = f"my_{re.sub('[^A-Za-z0-9]+', '_', text).strip('_') or 'name'}"
        raise DiagnosticError(mistakes.ReservedName(span=span, name=text, reason=reason, suggestion=suggestion[:MAX_NAME]))


def _check_name(node: Node) -> None:
    check_name(str(node.value), node.span)


class _Block:
    """One `attention` block: its statements by keyword, then its spec."""

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

    def load(self) -> Loaded:
        self._sort()
        dtype = self._dtype("dtype", self._required("dtype", "dtype fp16").children[0], STORAGE_DTYPES)
        sizes = [int(n.value) for n in self._required("head_dim", "head_dim 64").children]
        head_dim, head_dim_v = sizes[0], sizes[-1]
        heads = [int(n.value) for n in self.single["heads"].children] if "heads" in self.single else [None, None]
        self._globals(head_dim, head_dim_v)
        resolver = Resolver(self.globals)
        self._lets(resolver)
        score = self._expression(resolver, "score")
        scale = self._expression(resolver, "scale")
        sink = self._expression(resolver, "sink")
        spec = AttentionSpec(
            name=str(self.title.value),
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            scale=default_scale(head_dim) if scale is None else as_float(scale),
            q_heads=heads[0],
            kv_heads=heads[1],
            inputs=tuple(self.inputs),
            params=tuple(self.params),
            mask=self._expression(resolver, "mask"),
            score=S if score is None else as_float(score),
            normalize=self._normalize(),
            sink=None if sink is None else as_float(sink),
            lse=self._lse(),
            schedule=self._schedule(),
        )
        try:
            check(spec)
        except DiagnosticError as error:
            raise error.located(self.spans | {"": self.title.span}) from None
        return Loaded(spec, self.source, self.spans)

    def _sort(self) -> None:
        """Statements by keyword; declarations in order."""
        declared = 0
        for node in self.statements:
            if node.kind in REPEATED:
                declared += 1
                if declared > MAX_DECLARATIONS:
                    raise DiagnosticError(
                        mistakes.TooManyNames(span=node.span, limit=MAX_DECLARATIONS, what="declarations in one attention")
                    )
                self._declaration(node)
                continue
            if node.kind in self.single:
                line = self.single[node.kind].span.line
                raise DiagnosticError(mistakes.DuplicateStatement(span=node.span, keyword=node.kind, line=line))
            self.single[node.kind] = node
            self.spans[node.kind] = _operands(node)

    def _declaration(self, node: Node) -> None:
        title = node.children[0]
        match node.kind:
            case "input":
                declared = self._input(node)
                self.inputs.append(declared)
                self.spans[f"input {declared.name}"] = title.span
                _declare(self.scope, self.seen, node, declared)
            case "param":
                _declare(self.scope, self.seen, node, constant(0))
                self.spans[f"param {title.value}"] = title.span
            case "let":
                _declare(self.scope, self.seen, node, Definition(str(title.value), (), node.children[1], self.scope))
            case "define":
                _declare(self.scope, self.seen, node, definition_of(node, self.scope))

    def _input(self, node: Node) -> Input:
        title, dtype, dims = node.children
        element = self._dtype("input", dtype, tuple(DTYPES.values()))
        return Input(str(title.value), element, tuple(self._dimension(d) for d in dims.children))

    def _dimension(self, node: Node) -> int | str:
        if node.kind == "INT":
            return int(str(node.value)[:12])
        text = SPELLED.get(str(node.value), str(node.value))
        if text in SIZES:
            return text
        near = get_close_matches(text, [*SIZES, *SPELLED], 1, 0.8)
        if near:
            raise DiagnosticError(mistakes.UnknownDimension(span=node.span, name=text, near=near[0]))
        _check_name(node)
        return text

    def _dtype(self, keyword: str, node: Node, known: tuple[DType, ...]) -> DType:
        found = DTYPES.get(str(node.value))
        if found in known:
            assert found is not None
            return found
        names = [t.name for t in known]
        spelled = {
            "float16": "fp16",
            "half": "fp16",
            "bfloat16": "bf16",
            "float32": "fp32",
            "float": "fp32",
            "int": "int32",
        }
        near = [spelled[node.value]] if spelled.get(node.value) in names else get_close_matches(str(node.value), names, 1)
        hint = f"did you mean `{near[0]}`?" if near else "not among those that kernels are made for"
        of_what = " of Q, K and V" if keyword == "dtype" else " of an input"
        raise DiagnosticError(
            mistakes.UnknownDType(span=node.span, dtype=str(node.value), of_what=of_what, hint=hint, known=", ".join(names))
        )

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
                        raise DiagnosticError(
                            mistakes.DuplicateName(
                                span=self.spans[f"input {declared.name}"],
                                name=dim,
                                taken_by="a dimension and something else cannot share a name",
                            )
                        )
                    self.globals[dim] = name(dim, Type.INT)
        for node in self.statements:
            if node.kind == "param":
                param = self._param(node)
                self.params.append(param)
                self.scope.names[param.name] = name(param.name, param.type)

    def _param(self, node: Node) -> Param:
        title, kind, *default = node.children
        if kind.value not in ("int", "float"):
            raise DiagnosticError(mistakes.UnknownParamType(span=kind.span, found=kind.value))
        wanted = Type(kind.value)
        if not default:
            return Param(str(title.value), wanted)
        value = Resolver({}).expression(default[0], Scope(outer=self.scope.outer))
        if wanted is Type.FLOAT and value.type is Type.INT:
            value = as_float(value)
        if not isinstance(value, Const) or value.type is not wanted:
            found = f"a {value.type}" if isinstance(value, Const) else "not a constant"
            raise DiagnosticError(
                mistakes.BadDefault(span=default[0].span, name=title.value, expected=str(wanted), found=found)
            )
        return Param(str(title.value), wanted, value.value)

    def _lets(self, resolver: Resolver) -> None:
        for node in self.statements:
            if node.kind == "let":
                title, body = node.children
                value = resolver.expression(body, self.scope)
                uses = names_in(value) | inputs_in(value)
                if uses:
                    raise DiagnosticError(mistakes.NotConstant(span=body.span, name=title.value, uses=", ".join(sorted(uses))))
                self.scope.names[str(title.value)] = value

    def _expression(self, resolver: Resolver, keyword: str) -> Expr | None:
        if keyword not in self.single:
            return None
        resolver.steps = 0
        return resolver.expression(self.single[keyword].children[0], self.scope)

    def _normalize(self) -> Normalize:
        if "normalize" not in self.single:
            return "softmax"
        node = self.single["normalize"].children[0]
        for known in get_args(Normalize):
            if node.value == known:
                chosen: Normalize = known
                return chosen
        raise DiagnosticError(
            mistakes.UnknownNormalize(span=node.span, found=node.value, hint=_near(node.value, get_args(Normalize)))
        )

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
            raise DiagnosticError(
                mistakes.UnknownRung(span=rung.span, found=rung.value, hint=_near(rung.value, get_args(Rung)))
            )
        chosen: dict[str, int] = {}
        for keyword, value, node in _options(options):
            if keyword in chosen:
                raise DiagnosticError(mistakes.DuplicateStatement(span=node.span, keyword=node.kind, line=node.span.line))
            chosen[keyword] = value
        return Schedule(rung=rung.value, **chosen)


def _options(nodes: list[Node]) -> Iterator[tuple[str, int, Node]]:
    for node in nodes:
        values = [int(str(c.value)[:12]) for c in node.children]
        if node.kind == "tile":
            yield "block_q", values[0], node
            yield "block_kv", values[1], node
        else:
            yield node.kind, values[0], node


def _near(found: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(found, known, 1)
    return f"did you mean `{near[0]}`?" if near else f"not one of {', '.join(known)}"


def _operands(node: Node) -> Span:
    """The span of what follows a statement's keyword."""
    if not node.children:
        return node.span
    return node.children[0].span.to(node.children[-1].span)


def as_float(expr: Expr) -> Expr:
    """`expr` as a float; truth values are left for the checker to refuse."""
    return apply("float", expr) if expr.type is Type.INT else expr


def default_scale(head_dim: int) -> Expr:
    """1 / sqrt(head_dim) (Vaswani et al. 2017)."""
    return constant(float(max(head_dim, 1)) ** -0.5)
