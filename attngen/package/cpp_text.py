"""Expressions as C++ for the host: every integer has 64 bits, every float is a double.

Formulas of launches, conditions of calls and the reference of test programs are printed here, from the same table of operators
as CUDA (`attngen.emit.cuda_text`). The functions that the text calls are in templates/package/functions.hpp.j2.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from attngen.emit.cuda_text import Temporary, accessor, fits_int, parenthesize
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, walk
from attngen.spec.operator import ADD, AND, CALL, COMPARE, CONDITIONAL, EQUAL, MULTIPLY, OR, TABLE, UNARY

Text = tuple[str, int]  # text and the precedence of its outermost operator
CTYPES = {Type.BOOL: "bool", Type.INT: "long long", Type.FLOAT: "double"}
TO_DOUBLE = (  # patterns of the CUDA column: functions of fp32, conversions, constants
    (re.compile(r"\b__float2int_rz\("), "to_int("),
    (re.compile(r"\b([a-z]\w*)f\("), r"\1("),
    (re.compile(r"\bfloat\("), "double("),
    (re.compile(r"\b(\d+\.\d+)f\b"), r"\1"),
)


@dataclass(frozen=True, slots=True)
class CppText:
    """Several expressions printed together: the temporaries that they share, then each one's text."""

    temporaries: tuple[Temporary, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CppPrinter:
    """Prints expressions whose names are spelled by `names`; captured tensors are read by their accessors from `in`. With
    `of_sizes` no operand is negative. Temporaries are called `prefix` and a number."""

    names: Mapping[str, str]
    of_sizes: bool = False
    prefix: str = "t"

    def print(self, *roots: Expr, known: Mapping[Expr, str] = MappingProxyType({}), share: bool = True) -> CppText:
        """The text of `roots`; nodes that are `known` have a name. Without `share` there are no temporaries."""
        texts: dict[Expr, Text] = {node: (name, CALL) for node, name in known.items()}
        nodes = list(walk(*roots, known=texts))
        uses = Counter(arg for node in nodes for arg in node.args)
        temporaries: list[Temporary] = []
        for node in nodes:
            text = self._node(node, texts)
            if share and uses[node] > 1 and node.args:
                name = f"{self.prefix}{len(temporaries)}"
                temporaries.append(Temporary(CTYPES[node.type], name, text[0]))
                text = name, CALL
            texts[node] = text
        return CppText(tuple(temporaries), tuple(texts[root][0] for root in roots))

    def _node(self, node: Expr, texts: Mapping[Expr, Text]) -> Text:
        match node:
            case Const():
                return literal(node.value)
            case Name():
                return self.names[node.name], CALL
            case Gather():
                return f"{accessor(node.input)}(in{''.join(f', {texts[a][0]}' for a in node.args)})", CALL
            case Apply():
                row = TABLE[node.op]
                spelling = row.cuda[node.args[-1].type if node.op == "where" else node.args[0].type]
                if self.of_sizes and row.nonnegative:
                    spelling = row.nonnegative
                operands = [_operand(texts[a], spelling.precedence, i) for i, a in enumerate(node.args)]
                return in_double(spelling.text).format(*operands), spelling.precedence
        raise AssertionError(node)


def in_double(cuda: str) -> str:
    """The CUDA text of an operator with doubles in place of fp32."""
    for pattern, replacement in TO_DOUBLE:
        cuda = pattern.sub(replacement, cuda)
    return cuda


def _operand(text: Text, outer: int, position: int) -> str:
    """An operand, in parentheses where C++ or its compilers' warnings want them."""
    if outer == CALL:
        return text[0]
    if position == 0 and text[1] == outer and outer in (MULTIPLY, ADD, AND, OR):
        return text[0]
    least = outer + 1
    if outer == CONDITIONAL or outer < EQUAL:  # `a && b || c`, `a & b + c`
        least = EQUAL if outer in (AND, OR) else UNARY
    if outer in (EQUAL, COMPARE):
        least = ADD
    return parenthesize(text, least)


def literal(value: bool | int | float) -> Text:
    if isinstance(value, bool):
        return ("true" if value else "false"), CALL
    if isinstance(value, int):
        suffix = "" if fits_int((value, value)) else "LL"
        return ("INT64_MIN", CALL) if value == -(2**63) else (f"{value}{suffix}", UNARY if value < 0 else CALL)
    if math.isnan(value):
        return "(INF - INF)", CALL
    if math.isinf(value):
        return ("INF", CALL) if value > 0 else ("-INF", UNARY)
    return repr(value), UNARY if math.copysign(1.0, value) < 0 else CALL
