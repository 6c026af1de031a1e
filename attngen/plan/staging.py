"""Elements of captured tensors that a key, or a row, has for itself: they need not be read anew for each pair.

key vector    an index is `k` itself, the others are the same for a whole block: a tile's elements are staged in shared
              memory beside its keys (`document[b, k]`, `bias[h, k]`)
row element   the same of `q`: a thread reads those of its rows once (`document[b, q]`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.facts import fact
from attngen.plan.tiles import K, Q
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import FP32, INT32, DType
from attngen.spec.expr import Expr, Gather, Name, name, names_in, rewrite, walk

KEY_BYTES = 16  # staged of a key at most, over all vectors: what the producer's lanes have registers for
ROW_ELEMENTS = 4  # at most: a thread keeps each of them for two rows


@dataclass(frozen=True, slots=True)
class Element:
    """`gather`, read once for each key or row. `name` is what functions of pairs call it; `in_score`: the score reads it,
    which is asked of every tile, not the mask alone, which is asked of partial ones."""

    name: str
    gather: Gather
    dtype: DType
    in_score: bool

    @property
    def symbol(self) -> Name:
        """What stands for it in expressions; the dot keeps it apart from every name of a spec."""
        return name(f".{self.name}", self.gather.type)

    @property
    def stored(self) -> DType:
        """What it is in shared memory: of 32 bits at least, so that two neighbours are one load of a word each."""
        return {"float": FP32, "bool": INT32}.get(self.dtype.kind, self.dtype)


@dataclass(frozen=True, slots=True)
class Staged:
    """What is read once for each key, and once for each row."""

    keys: tuple[Element, ...] = ()
    rows: tuple[Element, ...] = ()

    @property
    def elements(self) -> tuple[Element, ...]:
        return (*self.keys, *self.rows)

    @property
    def key_bytes(self) -> int:
        return sum(e.stored.bytes for e in self.keys)

    def named(self, expr: Expr) -> Expr:
        """`expr` with names in the place of these elements."""
        names: dict[Expr, Expr] = {e.gather: e.symbol for e in self.elements}
        return rewrite(expr, names.get)


NOTHING = Staged()


@fact
def staged(spec: AttentionSpec) -> Staged:
    """The elements that `spec`'s mask and score read; rows' own only where there are key vectors."""
    keys: list[Element] = []
    for element in _elements(spec, K):
        if sum(e.stored.bytes for e in (*keys, element)) <= KEY_BYTES:
            keys.append(element)
    return Staged(tuple(keys), tuple(_elements(spec, Q))[:ROW_ELEMENTS]) if keys else NOTHING


def _elements(spec: AttentionSpec, index: Name) -> Iterator[Element]:
    in_score = set(walk(spec.score))
    found: dict[str, int] = {}
    for node in walk(*(e for e in (spec.score, spec.mask) if e is not None)):
        if isinstance(node, Gather) and _is_of(index, node):
            count = found[node.input] = found.get(node.input, 0) + 1
            suffix = "" if count == 1 else str(count)
            yield Element(f"{node.input}_of_{index.name}{suffix}", node, spec.input(node.input).dtype, node in in_score)


def _is_of(index: Name, node: Gather) -> bool:
    """Whether one index is `index` itself and the others are the same for all pairs of a block."""
    others = [a for a in node.args if a is not index]
    return len(others) == len(node.args) - 1 and not names_in(*others) & {"q", "k", "s"}
