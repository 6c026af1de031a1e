"""Expressions as CUDA text: precedence-aware, shared subexpressions named once, integers as wide as they need to be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attngen.spec.bounds import Range, ranges
from attngen.spec.cost import is_called
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, name, walk
from attngen.spec.obligations import DIVISIONS
from attngen.spec.operator import CALL, CONDITIONAL, INT64_MIN, MULTIPLY, TABLE, UNARY, ZERO, is_comparison

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
LEAST_FLOAT = 2.0**-149  # above 0, of fp32: NVRTC refuses literals that are rounded to 0
INFINITE_FLOAT = 2.0**128 - 2.0**103  # what is as large is rounded to infinity in fp32, which NVRTC refuses too

Text = tuple[str, int]  # text and the precedence of its outermost operator


@dataclass(frozen=True, slots=True)
class Temporary:
    """`const ctype name = text;`"""

    ctype: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CudaText:
    """Several expressions printed together: the temporaries that they share, then each one's text."""

    temporaries: tuple[Temporary, ...]
    results: tuple[str, ...]
    ctypes: tuple[str, ...]
    helpers: frozenset[str]


@dataclass(slots=True)
class CudaPrinter:
    """Prints expressions whose names are spelled by `names`; captured tensors are read through their accessors.

    `name_ranges` and `element_ranges` decide the width of integers: a node whose value might not fit 32 bits is computed
    in 64. Accessors take the struct of captured values, `in`, as their first argument.
    """

    names: Mapping[str, str]
    name_ranges: Mapping[str, Range]
    element_ranges: Mapping[str, Range]
    approximate: Literal["", "fast", "rough"] = ""  # by the columns of operators; "fast": results are rounded to 16 bits
    helpers: set[str] = field(default_factory=set)
    _tested: frozenset[Expr] = frozenset()  # remainders of which only zero matters, which C's `%` has where this language's has
    _exact: frozenset[Expr] = frozenset()  # what is never approximated
    _inlined: bool = True  # whether the code is copied to where it is called; other code calls functions

    def print(self, *roots: Expr, share: bool = True, inlined: bool = True) -> CudaText:
        """The text of `roots`; `inlined`: of code that is copied to where it is called."""
        known: dict[Expr, Range] = {}
        for root in roots:
            known |= ranges(root, self.name_ranges, self.element_ranges)
        uses = Counter(arg for node in walk(*roots) for arg in node.args)
        uses.update(roots)
        texts: dict[Expr, Text] = {}
        temporaries: list[Temporary] = []
        self._tested = _tested_for_zero(roots)
        self._exact = below_steps(roots) if self.approximate else frozenset()
        self._inlined = inlined
        skips = inlined and any(isinstance(node, Apply) and node.op in SKIPPING for node in walk(*roots))
        for node in walk(*roots):
            text = self._node(node, texts, known)
            if share and ((uses[node] > 1 and node.args) or (skips and _computed_first(node))):
                name = f"t{len(temporaries)}"
                temporaries.append(Temporary(ctype(node, known), name, text[0]))
                text = name, CALL
            texts[node] = text
        return CudaText(
            tuple(temporaries),
            tuple(texts[r][0] for r in roots),
            tuple(ctype(r, known) for r in roots),
            frozenset(self.helpers),
        )

    def _node(self, node: Expr, texts: Mapping[Expr, Text], known: Mapping[Expr, Range]) -> Text:
        match node:
            case Const():
                return literal(node)
            case Name():
                return self.names[node.name], CALL
            case Gather():
                indices = "".join(f", {texts[a][0]}" for a in node.args)
                return f"{accessor(node.input)}(in{indices})", CALL
            case Apply():
                return self._apply(node, texts, known)
        raise AssertionError(node)

    def _apply(self, node: Apply, texts: Mapping[Expr, Text], known: Mapping[Expr, Range]) -> Text:
        approximation = self._approximation(node, texts) if self.approximate and node not in self._exact else None
        if approximation is not None:
            return approximation
        row = TABLE[node.op]
        if not self._inlined and is_called(node.op):
            self.helpers.add(f"called_{node.op}")
            return f"called_{node.op}({', '.join(texts[a][0] for a in node.args)})", CALL
        spelling = row.cuda[node.args[-1].type if node.op == "where" else node.args[0].type]
        operand_ranges = [known[a] for a in node.args if a.type is Type.INT]
        if row.nonnegative and (node in self._tested or all(lo >= 0 for lo, _ in operand_ranges)):
            spelling = row.nonnegative
        else:
            self.helpers.update(row.helpers)
        wide = not all(map(fits_int, operand_ranges)) or (node.type is Type.INT and not fits_int(known[node]))
        operands = []
        for position, arg in enumerate(node.args):
            is_narrow = arg.type is Type.INT and fits_int(known[arg])
            text = _widened(arg, texts[arg]) if wide and is_narrow else texts[arg]
            operands.append(self._operand(text, spelling.precedence, position))
        if node.op == "mod" and _quotient_may_overflow(operand_ranges, INT64_MIN if wide else INT32_MIN):
            self.helpers.add(DIVISOR_OF_REMAINDER)
            operands[1] = f"{DIVISOR_OF_REMAINDER}({operands[1]})"
        text = spelling.text.format(*operands), spelling.precedence
        if wide and node.type is Type.INT and fits_int(known[node]):
            return f"(int){parenthesize(text, UNARY)}", UNARY
        return text

    def _approximation(self, node: Apply, texts: Mapping[Expr, Text]) -> Text | None:
        """An operator as the GPU approximates it, by the primitive that it then is; None if it has no approximation."""
        primitive = TABLE[node.op].fast if self.approximate == "fast" else TABLE[node.op].rough
        if primitive:
            if self.approximate == "fast" and (scaled := times_factor(node.args[0])) is not None:
                return f"{primitive}({texts[scaled[0]][0]}, {texts[scaled[1]][0]})", CALL
            return f"{primitive}({', '.join(texts[a][0] for a in node.args)})", CALL
        if node.op == "div" and _has_reciprocal(node.args[1]):
            dividend = self._operand(texts[node.args[0]], MULTIPLY, 0)
            divisor = parenthesize(texts[node.args[1]], UNARY)
            return f"{dividend} * (1.0f / {divisor})", MULTIPLY  # an IEEE division costs twenty instructions
        return None

    def _operand(self, text: Text, outer: int, position: int) -> str:
        if outer == CALL:
            return text[0]
        # Infix operators group from the left: only their first operand may be another of the same precedence
        grouped = position == 0 and outer not in (UNARY, CONDITIONAL)
        return parenthesize(text, outer if grouped else outer + 1)


def _widened(node: Expr, text: Text) -> Text:
    """An int as 64 bits."""
    if isinstance(node, Const) and text[0][-1].isdigit():
        return f"{text[0]}LL", text[1]
    return f"(long long){parenthesize(text, UNARY)}", UNARY


# Operators that need not compute every operand.
SKIPPING = ("and", "or", "where")


def _computed_first(node: Expr) -> bool:
    """Whether `node` is computed before any SKIPPING operator: elements are read, since behind branches each read would wait
    for the one before; and integers divided by what is no constant, since pairs at the same distance share a division, but
    not from branch to branch. Neither can go wrong: calls are checked for indices and divisors before anything is launched.
    In functions that are too large to be inlined, nothing is: so many values find no registers."""
    divides = isinstance(node, Apply) and node.op in DIVISIONS and not isinstance(node.args[1], Const)
    return divides or isinstance(node, Gather)


DIVISOR_OF_REMAINDER = "divisor_of_remainder"  # a helper


def _quotient_may_overflow(operands: list[Range], least: int) -> bool:
    """Whether a quotient may be that of -1 and `least`, the least integer of a type, which the type does not have. C++ does not
    define the remainder then either, and a CPU ends the program."""
    (dividend, _), (low, high) = operands
    return dividend <= least and low <= -1 <= high


def _tested_for_zero(roots: tuple[Expr, ...]) -> frozenset[Expr]:
    """The remainders that are compared with zero, and used for nothing else."""
    tested: set[Expr] = set()
    used = set(roots)
    for node in walk(*roots):
        is_test = isinstance(node, Apply) and node.op in ("eq", "ne") and ZERO in node.args
        (tested if is_test else used).update(node.args)
    return frozenset(n for n in tested - used if isinstance(n, Apply) and n.op == "mod")


def below_steps(roots: tuple[Expr, ...]) -> frozenset[Expr]:
    """What comparisons and roundings to whole numbers depend on. There the least error may be a whole step: 49.0 / 49.0 is
    1, and 49.0 times the reciprocal of 49.0 is less."""
    steps = (n for n in walk(*roots) if isinstance(n, Apply) and (is_comparison(n.op) or n.op in ("floor", "ceil", "int")))
    return frozenset(walk(*(operand for node in steps for operand in node.args)))


def _has_reciprocal(node: Expr) -> bool:
    """Whether `node` is a constant whose reciprocal is a normal number of fp32."""
    return isinstance(node, Const) and 1e-30 < abs(node.value) < 1e30


SCALE = name("scale.of_call", Type.FLOAT)  # the scale of a call, if it is no constant, which kernels compute once


def times_factor(node: Expr) -> tuple[Expr, Expr] | None:
    """The operands of `expression * factor`, if the factor is one number for the call: a constant, or one times SCALE."""
    if isinstance(node, Apply) and node.op == "mul" and (isinstance(node.args[1], Const) or SCALE.name in node.args[1].names):
        return node.args[0], node.args[1]
    return None


def parenthesize(text: Text, least: int) -> str:
    return text[0] if text[1] >= least else f"({text[0]})"


def fits_int(range: Range) -> bool:
    return range[0] >= INT32_MIN and range[1] <= INT32_MAX


def ctype(node: Expr, known: Mapping[Expr, Range]) -> str:
    """The C type that holds `node`."""
    match node.type:
        case Type.BOOL:
            return "bool"
        case Type.FLOAT:
            return "float"
        case _:
            return "int" if fits_int(known[node]) else "long long"


def literal(node: Const) -> Text:
    """A constant as CUDA compiles it: `30.0f`, never `30f`; a negative one is a unary expression."""
    value = node.value
    if isinstance(value, bool):
        return ("true" if value else "false"), CALL
    if isinstance(value, int):
        if value == -(2**63):
            return "(-9223372036854775807LL - 1)", CALL
        if value == INT32_MIN:  # an int, which `-2147483648` is not: it is the negative of a number that is no int
            return "(-2147483647 - 1)", CALL
        return f"{value}{'' if INT32_MIN < value <= INT32_MAX else 'LL'}", UNARY if value < 0 else CALL
    if math.isnan(value):
        return "(INF - INF)", CALL
    if abs(value) >= INFINITE_FLOAT:
        return ("INF", CALL) if value > 0 else ("-INF", UNARY)
    if abs(value) <= LEAST_FLOAT / 2:
        value = math.copysign(0.0, value)
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return f"{text}f", UNARY if text[0] == "-" else CALL


def accessor(input: str) -> str:
    """The name of the device function that reads an element of a captured tensor."""
    return f"{c_name(input)}_at"


def c_name(name: str) -> str:
    """A name of a captured value as a C identifier: the planner's own names have dots, which no user's name can have."""
    return name.replace(".", "_")
