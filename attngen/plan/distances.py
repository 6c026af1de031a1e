"""What the pairs of a thread share where they are as far apart: a division by what is no constant."""

from __future__ import annotations

from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Apply, Const, names_in, walk
from attngen.spec.obligations import DIVISIONS


def divides_distances(spec: AttentionSpec) -> bool:
    """Whether the mask or the score divides what depends on both q and k by what is no constant."""
    dividends = (
        node.args[0]
        for e in (spec.mask, spec.score)
        if e is not None
        for node in walk(e)
        if isinstance(node, Apply) and node.op in DIVISIONS and not isinstance(node.args[1], Const)
    )
    return any({"q", "k"} <= names_in(e) for e in dividends)


def distances_of_a_thread(rows: int, block_kv: int) -> int:
    """The distances of a thread's pairs in a tile of `block_kv` keys: it has `rows` rows, every 8th, and 2 keys of every 8, as
    tensor cores deal them out."""
    return 2 * (rows + block_kv // 8 - 1)
