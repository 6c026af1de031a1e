"""Floats of indices by steps: that of a thread's first pair of a tile, and a constant for each other pair.

`float(q - k)` costs each pair a subtraction and a conversion. The pairs of a thread lie at constant distances from its first:
`float(q.first - k.first) + float(q.step - k.step)` costs one conversion for all of them, and each an addition of a constant.

The sum is exact in tiles whose numbers are at most 2^24, as the conversion is. Beyond, both numbers are rounded: its error is
at most a unit in the last place, where that of the conversion is half of one. Comparisons and other operators that are not
continuous keep the conversion.
"""

from __future__ import annotations

from attngen.plan.axes import AXES, MOVING
from attngen.plan.code_size import INLINED_UP_TO, cost_of_pairs
from attngen.spec.affine import AffineForm, affine_form
from attngen.spec.bounds import Range, ranges
from attngen.spec.expr import MAX_LENGTH, Apply, Expr, Name, Type, name, names_in, rewrite, walk
from attngen.spec.operator import FLOAT_ONE, TABLE, add, apply

MOST_PAIRS = 1024  # rows or keys of a tile: more than any plan has
MOST_COEFFICIENT = 2**12  # for the coefficients of an index: steps within a tile stay below 2^24
MOST_INDEX = 2**62  # for an integer at its first pair, which may lie a tile outside

# The index of a thread's first pair, and the step from there to another pair's
FIRST: dict[str, Name] = {axis.index: name(f"{axis.index}.first", Type.INT) for axis in AXES.values()}
STEP: dict[str, Name] = {axis.index: name(f"{axis.index}.step", Type.INT) for axis in AXES.values()}
STEP_RANGES: dict[str, Range] = {
    **{first.name: (-MOST_PAIRS, MAX_LENGTH + MOST_PAIRS) for first in FIRST.values()},
    **{step.name: (0, MOST_PAIRS) for step in STEP.values()},
}


def by_steps(expr: Expr, name_ranges: dict[str, Range], element_ranges: dict[str, Range]) -> Expr:
    """`expr` with floats of indices by steps; as it is if it would be too large to be inlined, where nothing is constant."""
    known = name_ranges | STEP_RANGES
    exact = _exact(expr)

    def replace(node: Expr) -> Expr | None:
        if not isinstance(node, Apply) or node.op != "float" or node in exact:
            return None
        (index,) = node.args
        step = _step(index)
        if step is None:
            return None
        first = rewrite(index, lambda leaf: FIRST[leaf.name] if isinstance(leaf, Name) and leaf.name in FIRST else None)
        low, high = ranges(first, known, element_ranges)[first]
        return add(apply("float", first), apply("float", step)) if max(-low, high) <= MOST_INDEX else None

    found = rewrite(expr, replace)
    return found if cost_of_pairs(found) <= INLINED_UP_TO else expr


def _step(index: Expr) -> Expr | None:
    """What `index` grows by from a thread's first pair to another; None if that is no sum of steps, or 0."""
    if index.type is not Type.INT:
        return None
    moving = {leaf: c for leaf, c in affine_form(index).coefficients.items() if names_in(leaf) & MOVING}
    if not moving or not all(isinstance(leaf, Name) and abs(c) <= MOST_COEFFICIENT for leaf, c in moving.items()):
        return None
    return AffineForm({STEP[leaf.name]: c for leaf, c in moving.items() if isinstance(leaf, Name)}).to_expr()


def _exact(expr: Expr) -> set[Expr]:
    """The nodes of which an operator reads more than about how large they are: comparisons, floor, conversions to integers."""
    discrete = (n for n in walk(expr) if isinstance(n, Apply) and n.op != "float" and _is_discrete(n))
    return set(walk(*(a for n in discrete for a in n.args)))


def _is_discrete(node: Apply) -> bool:
    return all(g is None for g in TABLE[node.op].derivative(FLOAT_ONE, node, *node.args))
