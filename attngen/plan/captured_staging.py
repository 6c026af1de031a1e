"""Staging of captured tensors: elements that depend on the key only, or the row only, are read once, not once per pair.

key vector    one index is `k`, the others are the same for a whole block (`document[b, k]`, `bias[h, k]`): the elements of a
              tile are staged in shared memory beside its keys
row element   one index is `q` (`document[b, q]`): a thread reads the elements of its rows once
row term      a part of the score that reads neither `s` nor `k` (`pow(2.0, -h)`): computed once per row, if it costs much
pair element  the last index is `k`, others differ from row to row (`bias[b, h, q, k]`): a warp copies those of a tile to shared
              memory, or a thread that has two neighbouring keys of a row reads their elements at once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.plan.axes import KEYS, ROWS
from attngen.plan.shared_memory import SharedBuffer
from attngen.spec.attention import AttentionSpec
from attngen.spec.cost import cost_as_tree
from attngen.spec.dtypes import FP32, INT32, DType
from attngen.spec.expr import Apply, Expr, Gather, Name, Type, inputs_in, name, names_in, rewrite, walk

KEY_BYTES = 16  # staged per key at most, over all vectors: the limit of the registers of the producer's lanes
MOST_TO_READ = 100  # the cost of reading an element, with its indices: kernels do it in several places
ROW_ELEMENTS = 4  # at most: a thread holds each of them for two rows
ROW_TERMS = 2  # at most, beside these
LEAST_OF_TERM = 25  # the cost of a term: a logarithm, or an element of two indices and arithmetic with it
MOST_OF_TERM = 400  # as much as a kernel has inline in a few places: a call would serialize products


@dataclass(frozen=True, slots=True)
class Element:
    """A staged element, read once per key, row or pair, or a term that is computed once per row."""

    name: str  # in functions of pairs
    expr: Expr  # a Gather, unless it is a term
    dtype: DType
    in_score: bool  # the score reads it, which is evaluated in every tile; else the mask alone, evaluated in partial tiles

    @property
    def symbol(self) -> Name:
        """The name that replaces it in expressions; the dot distinguishes it from all names of a spec."""
        return name(f".{self.name}", self.expr.type)

    @property
    def input(self) -> str:
        """The captured tensor that it is an element of."""
        assert isinstance(self.expr, Gather)
        return self.expr.input

    @property
    def stored(self) -> DType:
        """Its type in shared memory, of at least 32 bits, so that each element is one word."""
        return {"float": FP32, "bool": INT32}.get(self.dtype.kind, self.dtype)


@dataclass(frozen=True, slots=True)
class Staged:
    """The elements that are read once per key, and once per row."""

    keys: tuple[Element, ...] = ()
    rows: tuple[Element, ...] = ()
    pairs: tuple[Element, ...] = ()
    terms: tuple[Element, ...] = ()  # parts of the score that a row's pairs share

    @property
    def elements(self) -> tuple[Element, ...]:
        return (*self.keys, *self.rows, *self.pairs, *self.terms)

    @property
    def of_rows(self) -> tuple[Element, ...]:
        """What a thread has of each of its rows."""
        return (*self.rows, *self.terms)

    @property
    def key_bytes(self) -> int:
        return sum(e.stored.bytes for e in self.keys)

    def buffer(self, block_kv: int, slots: int = 0) -> SharedBuffer:
        """The buffer of the key vectors of a tile of `block_kv` keys, or of `slots` tiles."""
        dtypes = {e.stored.name for e in self.keys}
        same = len(dtypes) == 1
        vectors = (len(self.keys), block_kv) if same else (self.key_bytes * block_kv,)
        use = f"the key vectors of {slots} tiles" if slots else "elements of captured tensors, for each key of a tile"
        element = dtypes.pop() if same else "byte"
        return SharedBuffer(name="KEY_VECTORS", element=element, shape=(*([slots] if slots else []), *vectors), use=use)

    def named(self, expr: Expr) -> Expr:
        """`expr` with these elements replaced by their names."""
        names: dict[Expr, Expr] = {e.expr: e.symbol for e in self.elements}
        return rewrite(expr, names.get)


NOTHING = Staged()


def staged(spec: AttentionSpec) -> Staged:
    """The staged elements of the mask and score of `spec`; row elements only if there are key vectors."""
    keys: list[Element] = []
    for element in _elements(spec, KEYS.at):
        if sum(e.stored.bytes for e in (*keys, element)) <= KEY_BYTES:
            keys.append(element)
    return Staged(tuple(keys), tuple(_elements(spec, ROWS.at))[:ROW_ELEMENTS]) if keys else NOTHING


def pair_elements(spec: AttentionSpec) -> Staged:
    """The elements of 16 bits that the score alone reads for each pair, of one input each."""
    in_mask = set(walk(spec.mask)) if spec.mask is not None else set()
    found: dict[str, Element] = {}
    for node in walk(spec.score):
        if (
            isinstance(node, Gather)
            and node not in in_mask
            and _is_of_pairs(node)
            and spec.input(node.input).dtype is spec.dtype
        ):
            found.setdefault(node.input, Element(f"{node.input}_of_pair", node, spec.dtype, True))
    return Staged(pairs=tuple(found.values())) if spec.dtype.bytes == 2 else NOTHING


def row_terms(spec: AttentionSpec) -> tuple[Element, ...]:
    """The largest parts of the score that are floats of a row alone, read neither s nor k, and cost between LEAST_OF_TERM and
    MOST_OF_TERM."""
    terms: list[Element] = []
    stack: list[Expr] = [spec.score]
    seen: set[Expr] = set()
    while stack:
        node = stack.pop()
        if node in seen or not isinstance(node, Apply):
            continue
        seen.add(node)
        if node.type is Type.FLOAT and not names_in(node) & {"s", "k"} and cost_as_tree(node) >= LEAST_OF_TERM:
            suffix = "" if not terms else str(len(terms) + 1)
            terms.append(Element(f"row_term{suffix}", node, FP32, True))
        else:
            stack += reversed(node.args)
    return tuple(t for t in terms if cost_as_tree(t.expr) <= MOST_OF_TERM)[:ROW_TERMS]


def _is_of_pairs(node: Gather) -> bool:
    """Whether the last index of `node` is `k`, and another one depends on the row, but none on data or on other keys."""
    others, names = node.args[:-1], names_in(*node.args[:-1])
    if cost_as_tree(node) > MOST_TO_READ:
        return False
    return node.args[-1:] == (KEYS.at,) and "q" in names and not names & {"k", "s"} and not inputs_in(*others)


def _elements(spec: AttentionSpec, index: Name) -> Iterator[Element]:
    in_score = set(walk(spec.score))
    found: dict[str, int] = {}
    for node in walk(*(e for e in (spec.score, spec.mask) if e is not None)):
        if isinstance(node, Gather) and _is_of(index, node):
            count = found[node.input] = found.get(node.input, 0) + 1
            suffix = "" if count == 1 else str(count)
            yield Element(f"{node.input}_of_{index.name}{suffix}", node, spec.input(node.input).dtype, node in in_score)


def _is_of(index: Name, node: Gather) -> bool:
    """Whether one index of `node` is `index` and the others are the same for all pairs of a block."""
    others = [a for a in node.args if a is not index]
    if cost_as_tree(node) > MOST_TO_READ:
        return False
    return len(others) == len(node.args) - 1 and not names_in(*others) & {"q", "k", "s"}
