"""What the pairs of a thread share where they are as far apart: a division by what is no constant."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Apply, Const, Expr, names_in, walk
from attngen.spec.obligations import DIVISIONS


def divides_distances(spec: AttentionSpec) -> bool:
    """Whether the mask or the score divides what depends on both q and k by what is no constant."""
    return any({"q", "k"} <= names_in(e) for e in _dividends(spec))


def divides_places(spec: AttentionSpec) -> bool:
    """Whether the mask or the score divides what depends on either q or k alone by what is no constant."""
    return any(len({"q", "k"} & names_in(e)) == 1 for e in _dividends(spec))


def _dividends(spec: AttentionSpec) -> Iterator[Expr]:
    for e in (spec.mask, spec.score):
        for node in walk(e) if e is not None else ():
            if isinstance(node, Apply) and node.op in DIVISIONS and not isinstance(node.args[1], Const):
                yield node.args[0]


def distances_of_a_thread(rows: int, block_kv: int) -> int:
    """The distances of a thread's pairs in a tile of `block_kv` keys: it has `rows` rows, every 8th, and 2 keys of every 8, as
    tensor cores deal them out."""
    return 2 * (rows + block_kv // 8 - 1)
