"""Every operator as every operand of every operator: the printed C++ means what the expression means."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attngen.device.emulated.host_compiler import find_compiler
from attngen.emit.cuda_text import CudaPrinter
from attngen.emit.templates import template_directory
from attngen.spec.evaluate import evaluate
from attngen.spec.expr import Apply, Expr, ExpressionError, Type, name
from attngen.spec.obligations import DIVISIONS
from attngen.spec.operator import TABLE, apply

LEAVES = {
    Type.BOOL: [name(n, Type.BOOL) for n in ("a", "b", "c", "d")],
    Type.INT: [name(n, Type.INT) for n in ("i", "j", "m", "n")],
    Type.FLOAT: [name(n, Type.FLOAT) for n in ("x", "y", "z", "w")],
}
C_TYPES = {Type.BOOL: ctypes.c_bool, Type.INT: ctypes.c_int, Type.FLOAT: ctypes.c_float}
NUMBERS = ((7, -3, 2, 5), (-8, 3, -5, 4), (1, 1, 9, -1))
FLOATS = ((0.75, 1.5, 2.25, 0.3), (3.1, 0.2, 0.9, 1.7), (0.6, 0.6, 5.5, 0.6))
PROLOGUE = r"""
#include <math.h>
#define __device__
#define __forceinline__ inline
#define INF HUGE_VALF
template <typename A, typename B> auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> auto max(A a, B b) { return a > b ? a : b; }
template <typename A> A abs(A a) { return a < 0 ? -a : a; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __float2int_rz(float x) { return x != x ? 0 : x >= 0x1p31f ? 0x7fffffff : x <= -0x1p31f ? -0x7fffffff - 1 : int(x); }
"""


def signatures() -> Iterator[tuple[str, tuple[Type, ...], Type]]:
    """Each operator with each list of operand types that it takes as they are."""
    for op in TABLE:
        for count in (1, 2, 3):
            for types in itertools.product(Type, repeat=count):
                args = [LEAVES[t][n] for n, t in enumerate(types)]
                try:
                    node = apply(op, *args)
                except (ExpressionError, TypeError):
                    continue
                if isinstance(node, Apply) and node.op == op and node.args == tuple(args):
                    yield op, types, node.type


def pairs() -> Iterator[Apply]:
    """Each operator with each other as each operand."""
    known = list(signatures())
    for outer, types, _ in known:
        for position, wanted in enumerate(types):
            for inner, inner_types, result in known:
                if result is wanted:
                    operands: list[Expr] = [LEAVES[t][n] for n, t in enumerate(types)]
                    # leaves of the inner operator differ from its neighbours'
                    operands[position] = apply(inner, *(LEAVES[t][3 - n] for n, t in enumerate(inner_types)))
                    node = apply(outer, *operands)
                    if isinstance(node, Apply):
                        yield node


def points() -> Iterator[dict[str, object]]:
    """Values of all leaves."""
    names = [leaf.name for group in LEAVES.values() for leaf in group]
    for truths, (ints, floats) in itertools.product(
        itertools.product((False, True), repeat=4), zip(NUMBERS, FLOATS, strict=True)
    ):
        yield dict(zip(names, (*truths, *map(np.int64, ints), *map(np.float64, floats)), strict=True))


def divides_by_zero(expr: Apply) -> bool:
    """Whether the outer operator is a division whose divisor is 0 at a point."""
    return expr.op in DIVISIONS and any(evaluate(expr.args[1], point, lambda *_: None, np) == 0 for point in points())


def test_each_operator_as_each_operand(tmp_path: Path) -> None:
    found = [expr for expr in dict.fromkeys(pairs()) if not divides_by_zero(expr)]
    assert len(found) > 1500
    leaves = [leaf for group in LEAVES.values() for leaf in group]
    names, ranges = {leaf.name: leaf.name for leaf in leaves}, {leaf.name: (-9, 9) for leaf in LEAVES[Type.INT]}
    lines, called = [], set()
    for number, expr in enumerate(found):
        text = CudaPrinter(names, ranges, {}).print(expr, share=False)
        called |= text.helpers
        lines.append(f"    out[{number}] = {text.results[0]};")
    helpers = [(template_directory() / "parts" / f"{h}.cuh").read_text() for h in sorted(called)]
    declared = [f"{kind} {leaf.name}" for t, kind in zip(Type, ("bool", "int", "float"), strict=True) for leaf in LEAVES[t]]
    source, library = tmp_path / "pairs.cpp", tmp_path / "pairs.so"
    body = "\n".join(lines)
    source.write_text(
        "\n".join((PROLOGUE, *helpers, f'extern "C" void pairs(double* out, {", ".join(declared)}) {{\n{body}\n}}'))
    )
    find_compiler().run(["-O0", "-shared", "-fPIC", "-w", str(source)], library, "pairs of operators")
    function = ctypes.CDLL(str(library)).pairs
    values = (ctypes.c_double * len(found))()
    for given in points():
        arguments = zip(leaves, given.values(), strict=True)
        function(values, *(C_TYPES[leaf.type](value) for leaf, value in arguments))
        with np.errstate(all="ignore"):
            for expr, value in zip(found, values, strict=True):
                meant = float(evaluate(expr, given, lambda *_: None, np))
                same = (
                    value == meant
                    or (math.isnan(value) and math.isnan(meant))
                    or math.isclose(value, meant, rel_tol=1e-4, abs_tol=1e-5)
                )
                assert same, (expr, given, value, meant)
