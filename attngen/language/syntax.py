"""Text -> syntax tree, with the place of every node. The grammar is `attention.lark`; the parser is lark's LALR."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedToken

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.expr import MAX_DEPTH

MAX_TEXT = 2**20
MAX_NUMBER_DIGITS = 40

STATEMENTS = (
    "dtype", "head_dim", "heads", "mask", "score", "scale", "sink", "input", "param", "let", "def", "normalize", "output",
    "kernel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One node: `kind` is the grammar's alias; `value` what it holds, `children` the nodes below it."""

    kind: str
    span: Span
    value: Any = None
    children: tuple[Node, ...] = ()
    depth: int = 1


def parse(source: SourceFile) -> tuple[Node, ...]:
    """The attentions and definitions of a text. Raises DiagnosticError with the first mistake."""
    if len(source.text) > MAX_TEXT:
        start = Span(source, 1, 1, 1, 2)
        raise DiagnosticError(mistakes.TextTooLong(span=start, size=len(source.text), limit=MAX_TEXT))
    try:
        tree = _parser().parse(source.text)
        items: tuple[Node, ...] = _Build(source).transform_bottom_up(tree)
        return items
    except UnexpectedCharacters as error:
        span = Span(source, error.line, error.column, error.line, error.column + 1)
        raise DiagnosticError(mistakes.UnexpectedCharacter(span=span, character=repr(error.char))) from None
    except (UnexpectedToken, UnexpectedEOF) as error:
        raise DiagnosticError(_unexpected(source, error)) from None


@cache
def _parser() -> Lark:
    grammar = (Path(__file__).parent / "attention.lark").read_text()
    return Lark(grammar, parser="lalr", maybe_placeholders=False, propagate_positions=True)


# Terminals as a reader would call them; keywords are called by their text.
_CALLED = {
    "NAME": "a name",
    "INT": "a whole number",
    "FLOAT": "a number",
    "OR": "`or`",
    "AND": "`and`",
    "NOT": "`not`",
    "COMPARE": "a comparison",
    "ADD": "`+` or `-`",
    "MULTIPLY": "`*` or `/`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "EQUAL": "`=`",
}
_OPERATORS = {"OR", "AND", "COMPARE", "ADD", "MULTIPLY"}


def _unexpected(source: SourceFile, error: UnexpectedToken | UnexpectedEOF) -> Diagnostic:
    wanted = set(error.accepts if isinstance(error, UnexpectedToken) and error.accepts else error.expected)
    expected = _expectation(wanted)
    token = error.token
    if token.type == "$END":
        lines = source.text.rstrip().split("\n")
        span = Span(source, len(lines), max(1, len(lines[-1].rstrip())), len(lines), len(lines[-1].rstrip()) + 1)
        return mistakes.UnexpectedEnd(span=span, expected=expected)
    span = _token_span(source, token)
    if "DTYPE" in wanted and token.type == "NAME" and "NAME" not in wanted:
        near = get_close_matches(str(token), STATEMENTS, 1)
        hint = f"did you mean `{near[0]}`?" if near else "a statement is expected here"
        return mistakes.UnknownStatement(span=span, found=_short(token), hint=hint, known=", ".join(STATEMENTS))
    return mistakes.UnexpectedText(span=span, found=f"`{_short(token)}`", expected=expected)


def _short(token: Token) -> str:
    text = str(token)
    return text if len(text) <= 40 else text[:37] + "..."


def _expectation(wanted: set[str]) -> str:
    if {"NAME", "LPAR", "FLOAT"} <= wanted:
        return "an expression"
    if "DTYPE" in wanted:
        return "a statement or `}`"
    if wanted & _OPERATORS and "RPAR" in wanted:
        return "`)` or an operator"
    if wanted & _OPERATORS and "RSQB" in wanted:
        return "`]` or an operator"
    names = sorted(_CALLED.get(w, f"`{w.lower()}`") for w in wanted if w not in _OPERATORS)
    return " or ".join(names[:4]) or "an operator"


def _token_span(source: SourceFile, token: Token) -> Span:
    line, column = token.line or 1, token.column or 1
    return Span(source, line, column, token.end_line or line, token.end_column or column + 1)


class _Build:
    """Lark's tree -> Nodes. Called from the leaves up, without recursion, so that depth is a diagnostic and not a crash."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source

    def transform_bottom_up(self, tree: Any) -> tuple[Node, ...]:
        results: dict[int, Any] = {}
        for subtree in tree.iter_subtrees():
            children = [results[id(c)] if not isinstance(c, Token) else self._token(c) for c in subtree.children]
            results[id(subtree)] = self._node(subtree, children)
        root: Node = results[id(tree)]
        return root.children

    def _token(self, token: Token) -> Node:
        return Node(token.type, _token_span(self.source, token), str(token))

    def _node(self, tree: Any, children: list[Node]) -> Node:
        kind, meta = tree.data, tree.meta
        if meta.empty:
            span = Span(self.source, 1, 1, 1, 1)
        else:
            span = Span(self.source, meta.line, meta.column, meta.end_line, meta.end_column)
        depth = 1 + max((c.depth for c in children), default=0)
        if depth > MAX_DEPTH:
            raise DiagnosticError(mistakes.NestedTooDeeply(span=span, limit=MAX_DEPTH))
        if kind == "group":
            inner = children[0]
            return Node(inner.kind if inner.kind != "binary" else "grouped", span, inner.value, inner.children, depth)
        if kind in ("integer", "decimal"):
            return Node(kind, span, self._number(kind, children[0]), (), depth)
        if kind == "unary":
            return Node(kind, span, str(children[0].value), (children[1],), depth)
        if kind == "binary":
            left, operator, right = children
            return Node(kind, left.span.to(right.span), str(operator.value), (left, right), depth)
        return Node(str(kind), span, None, tuple(children), depth)

    def _number(self, kind: str, token: Node) -> int | float:
        text = str(token.value)
        if kind == "integer":
            if len(text) > MAX_NUMBER_DIGITS or int(text) > 2**63 - 1:
                shown = text if len(text) <= 24 else text[:21] + "..."
                raise DiagnosticError(mistakes.NumberTooLarge(span=token.span, number=shown, limit=str(2**63 - 1)))
            return int(text)
        if len(text) > 400 or float(text) > MAX_FLOAT:
            shown = text if len(text) <= 24 else text[:21] + "..."
            raise DiagnosticError(mistakes.NumberTooLarge(span=token.span, number=shown, limit="3.4e38, as fp32 holds"))
        return float(text)


MAX_FLOAT = 3.4028234663852886e38


__all__ = ["MAX_TEXT", "STATEMENTS", "Node", "parse"]
