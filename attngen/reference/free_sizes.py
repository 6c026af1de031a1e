"""Sizes for dimensions that only captured tensors have (`table[n]`), by the indices that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.bounds import Range, ranges
from attngen.spec.expr import Expr, ExpressionError, Gather, names_in, walk
from attngen.spec.obligations import call_ranges, expressions_that_read
from attngen.spec.ranges import element_ranges

LARGEST = 2**20  # elements of a dimension that gets its size here


def with_free_sizes(spec: AttentionSpec, shape: Shape, params: Mapping[str, int | float]) -> Shape:
    """`shape` with a size for each free dimension that it does not fix: one more than the largest index into it.

    A dimension whose index is bounded by the dimension itself keeps the default of `Shape`.
    """
    missing = [d for d in spec.free_dims if d not in shape.free]
    if not missing:
        return shape
    sizes = {name: size for name, size in shape.sizes(spec).items() if name not in missing}
    known = call_ranges(sizes, params)
    found: dict[str, int] = {}
    for _, expr in expressions_that_read(spec):
        for node in (node for node in walk(expr) if isinstance(node, Gather)):
            for index, dim in zip(node.args, spec.input(node.input).dims, strict=True):
                if dim in missing and dim not in names_in(index):
                    found[str(dim)] = max(found.get(str(dim), 1), _largest(spec, index, known) + 1)
    return replace(shape, free={**shape.free, **{d: n for d, n in found.items() if n <= LARGEST}})


def _largest(spec: AttentionSpec, index: Expr, known: dict[str, Range]) -> int:
    try:
        return int(ranges(index, known, element_ranges(spec))[index][1])
    except ExpressionError:
        return LARGEST
