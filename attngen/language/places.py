"""Where warnings are in a text: the parts of statements, and definitions that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attngen.diagnostics import Diagnostic, DiagnosticError
from attngen.language.resolve import Resolver, Scope, number_of
from attngen.language.syntax import Node
from attngen.source import Span
from attngen.spec import mistakes
from attngen.spec.expr import MAX_SIZE, Expr, Type, walk
from attngen.spec.operator import apply

PARTS = ("binary", "grouped", "unary", "name", "call", "index", "integer", "decimal")  # nodes of expressions


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of the parts of statements, by what they stand for: a typed expression has no position of its own."""

    statements: Mapping[str, Node]
    resolver: Resolver
    scope: Scope

    def __call__(self, statement: str, wanted: Expr) -> Span | None:
        """The span of the part of `statement` that stands for `wanted`, or else of the smallest part that contains it; None if
        there is none."""
        if statement not in self.statements:
            return None
        found: Span | None = None
        least = LARGEST
        open_ = [self.statements[statement].children[-1]]
        while open_:
            node = open_.pop()
            open_ += node.children
            if node.kind in PARTS and (size := self._size(node, statement, wanted)) < least:
                found, least = node.span, size
        return found

    def _size(self, node: Node, statement: str, wanted: Expr) -> tuple[bool, int]:
        """Whether `node` is something else than `wanted`, and its size; LARGEST if it does not contain `wanted`."""
        self.resolver.number = number_of(statement)
        try:
            expr = self.resolver.expression(node, self.scope)
        except DiagnosticError:  # the name of a function
            return LARGEST
        is_wanted = wanted is expr or (expr.type is Type.INT and wanted is apply("float", expr))
        return (not is_wanted, expr.size) if is_wanted or wanted in walk(expr) else LARGEST


LARGEST = True, MAX_SIZE + 1


def unused_definitions(declared: Sequence[Node], scope: Scope) -> tuple[Diagnostic, ...]:
    """Warnings about those of the `def` and `let` statements `declared` that nothing has read in `scope`."""
    words = {"define": "def", "let": "let"}
    titles = {node.children[0]: words[node.kind] for node in declared if node.children[0].value not in scope.read}
    return tuple(mistakes.UnusedDefinition(span=t.span, what=what, name=str(t.value)) for t, what in titles.items())
