"""Masks that read a table by the number of a block, `keep[h, q // 64, k // 64]`: a tile reads few elements of it.

The least and the greatest of these elements bound what the mask reads in the tile. The bounds read the elements themselves, so
that nothing is computed before the kernel, for a table of any size.
"""

from __future__ import annotations

from functools import reduce
from itertools import product

from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, constant, gather, names_in, walk
from attngen.spec.operator import Interval, add, apply, both, either, equal, less, minimum, negation, sub, where

Tile = tuple[int, int]  # rows and keys
MOST = 4  # elements along an axis; more of them leave the tile unknown
MOST_AXES = 2  # whose index changes within a tile: 4 x 4 elements


def reads_blocks(node: Gather) -> bool:
    """Whether `node` reads a table by numbers of blocks, along at most MOST_AXES axes."""
    moving = [index for index in node.args if names_in(index) & {"q", "k"}]
    return 0 < len(moving) <= MOST_AXES and all(map(_steps, moving))


def reads_tables(mask: Expr) -> bool:
    return any(isinstance(node, Gather) and reads_blocks(node) for node in walk(mask))


def of_table(node: Gather, indices: tuple[Interval, ...], unknown: Interval, tile: Tile | None = None) -> Interval:
    """The least and greatest element that `node` reads in a tile over which its indices lie within `indices`: `unknown` of
    tiles that read more than MOST along an axis, and if an element is NaN. The size of `tile` says how many there may be."""
    moving = [axis for axis, index in enumerate(node.args) if names_in(index) & {"q", "k"}]
    counts = [_count(index, tile) if axis in moving else 1 for axis, index in enumerate(node.args)]
    places = [_places(index, count) for index, count in zip(indices, counts, strict=True)]
    read: list[Expr] = [gather(node.input, node.type, place) for place in product(*places)]
    known = reduce(both, [less(sub(indices[a].hi, indices[a].lo), constant(counts[a])) for a in moving])
    if node.type is Type.BOOL:
        return Interval(both(known, reduce(both, read)), either(negation(known), reduce(either, read)))
    if node.type is Type.FLOAT:
        known = reduce(both, [known, *(equal(element, element) for element in read)])
    least, most = (reduce(lambda x, y, op=op: apply(op, x, y), read) for op in ("min", "max"))  # type: ignore[misc]
    return Interval(where(known, least, unknown.lo), where(known, most, unknown.hi))


def _places(index: Interval, count: int) -> list[Expr]:
    """The first `count` numbers of an interval, none past its end."""
    return [index.lo, *(minimum(add(index.lo, constant(i)), index.hi) for i in range(1, count))]


def _count(index: Expr, tile: Tile | None) -> int:
    """How many numbers `index` may be in a tile, at most MOST: of `q // c` and `k // c` it follows from the tile's size."""
    match index:
        case Apply(op="floordiv", args=(Name(name=which), Const(value=by))) if tile and by > 0:
            size = tile["qk".index(which)]
            whole = size % by == 0 or by % size == 0  # a tile holds whole blocks, or lies in one
            return min(MOST, (size - 1) // int(by) + (1 if whole else 2))
    return MOST


def _steps(index: Expr) -> bool:
    """Whether q and k occur in `index` only where they are divided by what is the same for the whole tile.

    The bounds of such an index over a tile lie within those that are checked for the whole call: they are read without a check.
    """
    if not names_in(index) & {"q", "k"}:
        return True
    if not isinstance(index, Apply):
        return False
    if index.op == "floordiv" and not names_in(index.args[1]) & {"q", "k"}:
        return not _reads(index)
    return all(map(_steps, index.args))


def _reads(index: Expr) -> bool:
    return isinstance(index, Gather) or any(map(_reads, index.args))
