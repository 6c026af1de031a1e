"""Text -> syntax tree, with the source position of every node. The grammar is `attention.lark`; the parser is lark's LALR."""

from __future__ import annotations

import re
import sys
import unicodedata
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import lark
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedToken

from attngen.cache.disk_cache import DiskCache, digest
from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.keywords import EXAMPLE
from attngen.language.foreign_words import comment_at, spelling_at
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.expr import MAX_DEPTH, MAX_FLOAT, MAX_FLOAT_TEXT
from attngen.spec.operator import TABLE

# The grammar's terminals by the table's precedence; unary minus (7) shares the symbols of ADD.
LEVELS = {1: "OR", 2: "AND", 3: "NOT", 4: "COMPARE", 5: "ADD", 6: "MULTIPLY"}
SYNONYMS = {"|": "or", "&": "and", "~": "not"}

MAX_TEXT = 2**17  # characters; a spec is a page, and hostile texts must not occupy the parser
MAX_NUMBER_DIGITS = 400
MAX_INTEGER = 2**63 - 1

STATEMENTS = (
    "dtype", "head_dim", "values", "heads", "mask", "score", "scale", "sink", "scaled", "dropout", "rotary", "input", "param",
    "let", "def", "normalize", "precision", "output", "kernel", "allow",
)  # fmt: skip
OPTIONS = ("tile", "stages", "warps", "q", "storage", "page_size", "batch_invariant")  # in a kernel statement


CACHE = DiskCache("parser", packaged=True)
LARK_OPTIONS: dict[str, Any] = {
    "parser": "lalr",
    "start": ["start", "expression", "operands"],
    "maybe_placeholders": False,
    "propagate_positions": True,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One node: `kind` is the grammar's alias, `value` a number or word, `children` the nodes below it."""

    kind: str
    span: Span
    value: Any = None
    children: tuple[Node, ...] = ()
    depth: int = 1


def parse(source: SourceFile, shown: SourceFile | None = None) -> tuple[Node, ...]:
    """The attentions and definitions of a text. Raises DiagnosticError with the first mistake; its excerpt is from `shown`, a
    text with the same positions."""
    return _parsed(source, "start", shown or source).children


def parse_expression(source: SourceFile) -> Node:
    """A text that is one expression. Raises DiagnosticError with the first mistake."""
    return _parsed(source, "expression", source).children[0]


def parse_rotation(source: SourceFile) -> Node:
    """A text that is the operands of a `rotary` statement. Raises DiagnosticError with the first mistake."""
    return _parsed(source, "operands", source).children[0]


def _parsed(source: SourceFile, start: str, shown: SourceFile) -> Node:
    if len(source.text) > MAX_TEXT:
        first = Span(source, 1, 1, 1, 2)
        raise DiagnosticError(mistakes.TextTooLong(span=first, size=len(source.text), limit=MAX_TEXT))
    try:
        tree = _parser().parse(source.text, start=start)
        return _Build(shown).transform_bottom_up(tree)
    except UnexpectedCharacters as error:
        span = Span(shown, error.line, error.column, error.line, error.column + 1)
        foreign = spelling_at(shown, error.line, error.column)
        unexpected = mistakes.UnexpectedCharacter(span=span, character=repr(error.char), instead=_instead_of(error.char))
        raise DiagnosticError(foreign or unexpected) from None
    except (UnexpectedToken, UnexpectedEOF) as error:
        token = error.token
        foreign = None if token.type == "$END" else spelling_at(shown, token.line or 1, token.column or 1)
        if foreign is None and token == "//":  # it is unexpected only where a statement may end
            foreign = comment_at(shown, token.line or 1, token.column or 1)
        raise DiagnosticError(foreign or _unexpected(shown, error)) from None


@cache
def _parser() -> Lark:
    """The parser, of tables on disk: to load them takes a tenth of the time that lark needs to make them."""
    grammar = (Path(__file__).parent / "attention.lark").read_text("utf-8") + _operator_terminals()
    name = digest(grammar, repr(LARK_OPTIONS), lark.__version__, sys.version)
    return Lark.load(BytesIO(CACHE.data(name, lambda: _tables(grammar))))


def _tables(grammar: str) -> bytes:
    file = BytesIO()
    Lark(grammar, **LARK_OPTIONS).save(file)
    return file.getvalue()


def _operator_terminals() -> str:
    """The terminal of each level of precedence, with the symbols of the operator table and their other spellings."""
    symbols: dict[str, set[str]] = {}
    for row in TABLE.values():
        if row.infix is not None and row.infix.precedence in LEVELS:
            other = {spelled for spelled, meant in SYNONYMS.items() if meant == row.infix.symbol}
            symbols.setdefault(LEVELS[row.infix.precedence], set()).update({row.infix.symbol}, other)
    longest_first = {level: sorted(found, key=lambda s: (-len(s), s)) for level, found in symbols.items()}
    return "".join(f"{level}.2: /{'|'.join(map(_pattern, found))}/\n" for level, found in longest_first.items())


def _pattern(symbol: str) -> str:
    return rf"{symbol}\b" if symbol.isalpha() else re.escape(symbol).replace("/", r"\/")


# Descriptions of terminals for a reader; those of keywords are their texts.
_CALLED = {
    "NAME": "a name",
    "TENSOR": "`q`, `k`, `v` or `o`",
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
    "$END": "the end of the expression",
}
_ALONE = {
    "LSQB": "dimensions, such as `[heads]`",
    "_X": "`x` and a number of keys",
}  # descriptions of the only possible terminal
OPTION = "an option of the kernel or `}`"
_OPERATORS = {"OR", "AND", "COMPARE", "ADD", "MULTIPLY"}


def _unexpected(source: SourceFile, error: UnexpectedToken | UnexpectedEOF) -> Diagnostic:
    wanted = set(error.accepts if isinstance(error, UnexpectedToken) and error.accepts else error.expected)
    expected = _expectation(wanted)
    token = error.token if error.token.type != "TENSOR" else error.token.update("NAME")  # a name wherever no tensor may stand
    if token.type == "$END":
        lines = source.text.rstrip().split("\n")
        span = Span(source, len(lines), max(1, len(lines[-1].rstrip())), len(lines), len(lines[-1].rstrip()) + 1)
        return mistakes.UnexpectedEnd(span=span, expected=expected)
    span = _token_span(source, token)
    word = re.search(r"\b(\w+)\s*$", source.text[: token.start_pos or 0])
    if (percentage := _percentage(source, token.start_pos or 0)) is not None:
        return percentage
    if "_DTYPE" in wanted and word is not None and word[1] in STATEMENTS:
        # a missing expression or type: the next statement's keyword was parsed as a name
        found = f"`{word[1]}`"
        of_dtype = re.search(r"\bdtype(?:\s+[qkvo]\s+\w+)*(?:\s+[qkvo])?\s+$", source.text[: word.start(1)])
        missing = "an element type" if of_dtype else "an expression"
        return mistakes.UnexpectedText(
            span=_span_at(source, *word.span(1)),
            found=found,
            expected=missing,
            instead=f"write {missing} before {found}",
        )
    number = re.search(r"(?<![\w.])[\d.]+$", source.text[: token.start_pos or 0])
    if token.type == "NAME" and number is not None and "NAME" not in wanted:
        joined = _short(number[0] + token)
        return mistakes.ForeignSpelling(
            span=_span_at(source, number.start(), (token.start_pos or 0) + len(token)),
            found=joined,
            label_text="a number consists of digits",
            cure=f"write all digits of the number, or {number[0]} * {_short(str(token))} for a product",
        )
    if "_DTYPE" in wanted and token.type == "NAME" and "NAME" not in wanted:
        if (outside := _option_outside(source, token)) is not None:
            return outside
        near = get_close_matches(str(token), STATEMENTS, 1)
        hint = f"did you mean `{near[0]}`?" if near else "a statement is expected here"
        cure = f"the statements are {', '.join(STATEMENTS)}"
        return mistakes.UnknownStatement(span=span, found=_short(str(token)), hint=hint, cure=cure)
    found = f"`{_short(str(token))}`"
    bracket = _open_bracket(source.text[: token.start_pos or 0])
    if bracket is not None and bracket[1] < span.line:
        cure = f"close the `{bracket[0]}` of line {bracket[1]}"
        return mistakes.UnexpectedText(span=span, found=found, expected=expected, instead=cure)
    instead = _instead_of_token(token, wanted, expected, found, word[1] if word is not None else "")
    return mistakes.UnexpectedText(span=span, found=found, expected=expected, instead=instead)


def _option_outside(source: SourceFile, token: Token) -> Diagnostic | None:
    """The mistake of an option of the kernel outside of its braces, if the token is one; the help has all that follow it."""
    start = token.start_pos or 0
    one = r"tile\s+\d+\s*x\s*\d+|(?:stages|warps|page_size)\s+\d+|q\s+(?:registers|shared)|storage\s+\w+|batch_invariant\b"
    stated = re.match(rf"(?:{one})(?:\s+(?:{one}))*", source.text[start:])
    if str(token) not in OPTIONS or (stated is None and str(token) == "q"):
        return None
    kernel = re.search(r"\bkernel\s+(\w+)\s*$", source.text[:start])
    options = " ".join(stated[0].split()) if stated else "tile 128 x 64 stages 2"
    write = "write" if stated else "write options in braces, such as"
    return mistakes.UnexpectedText(
        span=_token_span(source, token),
        found=f"`{token}`",
        expected="a statement; this is an option of the kernel",
        instead=f"{write} kernel {kernel[1] if kernel else EXAMPLE} {{ {options} }}",
    )


def _percentage(source: SourceFile, end: int) -> Diagnostic | None:
    """The mistake of a percentage before character `end`; what followed it was read as the divisor."""
    statement = "|".join(STATEMENTS)
    found = re.search(rf"(?<![\w.])(\d{{1,3}}(?:\.\d{{0,9}})?)[ \t]*%(?=\s*(?:\b(?:{statement})\s*)?$)", source.text[:end])
    if found is None:
        return None
    return mistakes.ForeignSpelling(
        span=_span_at(source, *found.span()),
        found=found[0],
        label_text="`%` is the remainder of a division",
        cure=f"write {float(found[1]) / 100:g}",
    )


def _instead_of_token(token: Token, wanted: set[str], expected: str, found: str, before: str) -> str:
    """What to write instead of an unexpected token; `before` is the word before it."""
    if expected == _CALLED["$END"]:
        return f"remove {found}"
    if before == "kernel" and token.type == "LBRACE":
        return f"write the schedule before it, such as kernel {EXAMPLE} {{"
    if expected == OPTION and token.type == "NAME":
        near = get_close_matches(str(token), OPTIONS, 1)
        return f"write `{near[0]}`" if near else f"the options are {', '.join(OPTIONS)}"
    if "_ATTENTION" in wanted and token.type == "RBRACE":
        return f"remove {found}: no `{{` is open here"
    if "_ATTENTION" in wanted:
        near = get_close_matches(str(token).lower(), ("attention", "def"), 1)
        example = "attention my_attention { dtype fp16  head_dim 64  mask causal }"
        return f"write `{near[0]}`" if near else f"write an attention, such as {example}; for Python see attngen.define"
    if token.type in ("INT", "FLOAT") and "LPAR" in wanted and wanted & _OPERATORS:
        return f"write {before}({_short(str(token))}), or an operator"
    if token.type == "COMMA" and expected == OPTION:
        return f"remove {found}: nothing separates options"
    if token.type == "COMMA" and wanted & _OPERATORS:
        return f"write `and`, `or` or another operator, or remove {found}"
    if expected == "`{`" and found in ("`(`", "`[`", "`:`"):
        return f"write {expected} instead of {found}"
    if token.type == "RBRACE" or str(token) in STATEMENTS:  # the statement before it is not complete
        return f"write {expected} before {found}"
    return f"write {expected} here, or remove {found}"


def _instead_of(character: str) -> str:
    """What to do about a character that is in no word: full-width letters, digits and spaces have ordinary forms, Greek letters
    have names."""
    ordinary = unicodedata.normalize("NFKC", character)
    if ordinary.isspace():
        return "write an ordinary space"
    if ordinary.isascii() and ordinary != character and ordinary != ";":
        return f"write {ordinary}"
    if not ordinary.isalpha():
        return "remove it; a name consists of letters, digits and underscores"
    greek = re.match(r"GREEK (SMALL|CAPITAL) LETTER (?:FINAL )?(\w+)", unicodedata.name(ordinary[0], ""))
    plain = unicodedata.normalize("NFKD", ordinary)[0]  # without an accent
    if greek is None:
        return f"write {plain}" if plain.isascii() else "write the name with the letters a to z"
    called = greek[2].lower().replace("lamda", "lambda")
    return f"write {called if greek[1] == 'SMALL' else called.capitalize()}"


def _open_bracket(text: str) -> tuple[str, int] | None:
    """The innermost bracket that is open at the end of `text`, and its line; None if it is a brace, or there is none."""
    opened: list[tuple[str, int]] = []
    for found in re.finditer(r"#[^\n]*|([(\[{])|([)\]}])", text):
        if found[1]:
            opened.append((found[1], text.count("\n", 0, found.start()) + 1))
        elif found[2] and opened:
            opened.pop()
    return opened[-1] if opened and opened[-1][0] != "{" else None


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _expectation(wanted: set[str]) -> str:
    if "_TILE" in wanted:
        return OPTION
    if len(wanted) == 1 and (needed := _ALONE.get(*wanted)):
        return needed
    if {"NAME", "LPAR", "FLOAT"} <= wanted:
        return "an expression"
    if "_DTYPE" in wanted:
        return "a statement or `}`"
    if wanted & _OPERATORS and "RPAR" in wanted:
        return "`)` or an operator"
    if wanted & _OPERATORS and "RSQB" in wanted:
        return "`]` or an operator"
    if "_ATTENTION" in wanted:
        return "`attention` or `def`"
    names = sorted(_CALLED.get(w, f"`{w.lower().lstrip('_')}`") for w in wanted if w not in _OPERATORS)
    return " or ".join(names[:4]) or "an operator"


def _span_at(source: SourceFile, start: int, end: int) -> Span:
    """The span of characters `start` to `end`, within one line."""
    line = source.text.count("\n", 0, start) + 1
    column = start - (source.text.rfind("\n", 0, start) + 1) + 1
    return Span(source, line, column, line, column + end - start)


def _token_span(source: SourceFile, token: Token) -> Span:
    line, column = token.line or 1, token.column or 1
    return Span(source, line, column, token.end_line or line, token.end_column or column + 1)


class _Build:
    """Lark's tree -> Nodes, from the leaves up. There is no recursion, so that deep nesting is a diagnostic, not a crash."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source

    def transform_bottom_up(self, tree: Tree[Token]) -> Node:
        results: dict[int, Node] = {}
        for subtree in tree.iter_subtrees():
            children = [results[id(c)] if not isinstance(c, Token) else self._token(c) for c in subtree.children]
            if max((child.depth for child in children), default=0) >= MAX_DEPTH:
                raise DiagnosticError(mistakes.NestedTooDeeply(span=self._deepest_allowed(tree), limit=MAX_DEPTH))
            results[id(subtree)] = self._node(subtree, children)
        return results[id(tree)]

    def _deepest_allowed(self, root: Any) -> Span:
        """The first subtree at level MAX_DEPTH, counted from the whole text."""
        levels = {id(root): 1}
        for subtree in root.iter_subtrees_topdown():
            level = levels[id(subtree)]
            if level == MAX_DEPTH:
                break
            levels |= {id(child): level + 1 for child in subtree.children if not isinstance(child, Token)}
        meta = subtree.meta
        return Span(self.source, meta.line, meta.column, meta.end_line, meta.end_column)

    def _token(self, token: Token) -> Node:
        span = _token_span(self.source, token)
        if token.type == "INT":
            return Node(token.type, span, _integer(str(token), span))
        return Node(token.type, span, _decimal(str(token), span) if token.type == "FLOAT" else str(token))

    def _node(self, tree: Tree[Token], children: list[Node]) -> Node:
        kind, meta = tree.data, tree.meta
        if meta.empty:
            span = Span(self.source, 1, 1, 1, 1)
        else:
            span = Span(self.source, meta.line, meta.column, meta.end_line, meta.end_column)
        depth = 1 + max((c.depth for c in children), default=0)
        if kind == "group":
            inner = children[0]
            return Node(inner.kind if inner.kind != "binary" else "grouped", span, inner.value, inner.children, depth)
        if kind in ("integer", "decimal"):
            return Node(kind, span, children[0].value, (), depth)
        if kind == "unary":
            return Node(kind, span, str(children[0].value), (children[1],), depth)
        if kind == "binary":
            left, operator, right = children
            return Node(kind, left.span.to(right.span), str(operator.value), (left, right), depth)
        return Node(str(kind), span, None, tuple(children), depth)


def _integer(text: str, span: Span) -> int:
    if len(text) > MAX_NUMBER_DIGITS or int(text) > MAX_INTEGER:
        raise DiagnosticError(mistakes.NumberTooLarge(span=span, number=_short(text), limit=str(MAX_INTEGER)))
    return int(text)


def _decimal(text: str, span: Span) -> float:
    if len(text) > MAX_NUMBER_DIGITS or float(text) > MAX_FLOAT:
        raise DiagnosticError(mistakes.NumberTooLarge(span=span, number=_short(text), limit=MAX_FLOAT_TEXT))
    return float(text)
