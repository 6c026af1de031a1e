"""Masks that read a table by the number of a block, `keep[h, q // 64, k // 64]`: a tile reads few elements of it.

The least and the greatest of these elements bound what the mask reads in the tile. The bounds read the elements themselves, so
that nothing is computed before the kernel, for a table of any size.
"""

from __future__ import annotations

from functools import reduce
from itertools import product

from attngen.plan.axes import MOVING
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, constant, gather, inputs_in, names_in, walk
from attngen.spec.operator import Interval, add, both, either, equal, less, maximum, minimum, negation, sub, where

Tile = tuple[int, int]  # rows and keys
MOST = 4  # elements along a dimension; more of them leave the tile unknown
MOST_DIMS = 2  # dimensions whose index changes within a tile: 4 x 4 elements


def reads_blocks(node: Gather) -> bool:
    """Whether `node` reads a table by numbers of blocks, along at most MOST_DIMS dimensions."""
    moving = [index for index in node.args if names_in(index) & MOVING]
    return 0 < len(moving) <= MOST_DIMS and all(map(_steps, moving))


def reads_tables(mask: Expr) -> bool:
    return any(isinstance(node, Gather) and reads_blocks(node) for node in walk(mask))


def of_table(node: Gather, indices: tuple[Interval, ...], unknown: Interval, tile: Tile | None = None) -> Interval:
    """The least and greatest element that `node` reads in a tile over which its indices lie within `indices`.

    It is `unknown` if the tile reads more than MOST elements along a dimension, or an element is NaN. The lengths of `tile`
    limit the number of elements.
    """
    moving = [dim for dim, index in enumerate(node.args) if names_in(index) & MOVING]
    counts = [_count(index, tile) if dim in moving else 1 for dim, index in enumerate(node.args)]
    numbers = [_numbers(index, count) for index, count in zip(indices, counts, strict=True)]
    read: list[Expr] = [gather(node.input, node.type, element) for element in product(*numbers)]
    known = reduce(both, [less(sub(indices[dim].hi, indices[dim].lo), constant(counts[dim])) for dim in moving])
    if node.type is Type.BOOL:
        return Interval(both(known, reduce(both, read)), either(negation(known), reduce(either, read)))
    if node.type is Type.FLOAT:
        known = reduce(both, [known, *(equal(element, element) for element in read)])
    return Interval(where(known, reduce(minimum, read), unknown.lo), where(known, reduce(maximum, read), unknown.hi))


def _numbers(index: Interval, count: int) -> list[Expr]:
    """The first `count` numbers of an interval, none past its end."""
    return [index.lo, *(minimum(add(index.lo, constant(i)), index.hi) for i in range(1, count))]


def _count(index: Expr, tile: Tile | None) -> int:
    """How many numbers `index` may be in a tile, at most MOST. For `q // c` and `k // c` it follows from the tile's length."""
    match index:
        case Apply(op="floordiv", args=(Name(name=which), Const(value=by))) if tile and by > 0:
            length = tile["qk".index(which)]
            whole = length % by == 0 or by % length == 0  # a tile holds whole blocks, or lies in one
            return min(MOST, (length - 1) // int(by) + (1 if whole else 2))
    return MOST


def _steps(index: Expr) -> bool:
    """Whether q and k occur in `index` only as dividends of divisors that are the same for the whole tile.

    The bounds of such an index over a tile lie within those that are checked for the whole call, so elements are read without
    a check.
    """
    below = [index]
    while below:
        node = below.pop()
        if not names_in(node) & MOVING:
            continue
        if not isinstance(node, Apply):
            return False
        if node.op != "floordiv" or names_in(node.args[1]) & MOVING:
            below.extend(node.args)
        elif inputs_in(node):
            return False
    return True
