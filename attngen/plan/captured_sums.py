"""How schedules that keep no scores in memory add up the gradients of captured tensors.

What each pair adds goes to a workspace, and a last kernel adds that up in a fixed order:

    rows    a sum for each row, by the kernel that owns rows: elements that depend on b, h and q at most, and params
    keys    a sum for each key and query head, by the kernel that owns keys: elements that depend on b, h and k
    pairs   each term by itself, by the kernel that owns rows: elements that depend on q and k
    words   sums without rounding, so that their order does not matter, by atomic additions: all other elements. If an element
            depends on q and k by their distance, a block may first add up the diagonals of a tile; a warp adds up the terms of
            one element that its lanes have at the same time

In the first three no two blocks write to the same number. A term of the last goes to the words of its element, which
`templates/primitives/exact_sum.cuh` defines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.plan.facts import SpecFacts
from attngen.spec.expr import Expr
from attngen.spec.gradient import INDEX_NAMES, Access, CapturedGradient
from attngen.spec.operator import FLOAT_ONE

Place = Literal["rows", "keys", "pairs", "words"]
PLACES: dict[Access, Place] = {
    "head": "rows",
    "row": "rows",
    "key": "keys",
    "pair": "pairs",
    "distance": "words",
    "data": "words",
}
WORDS = 13  # per element that is summed without rounding (templates/primitives/exact_sum.cuh)


@dataclass(frozen=True, slots=True)
class TermSum:
    """A workspace that holds what pairs add to one captured tensor or param, `captured`."""

    captured: str
    place: Place
    reads: tuple[int, ...]  # the numbers of the contributions that add to it: all of one element, or, in words, all
    number: int = 0  # number of the workspace, if the tensor has several
    diagonals: bool = False  # words only: a term is the sum of a tile's diagonal, whose pairs read the same element

    @property
    def name(self) -> str:
        return f"{self.place}_of_{self.captured}{self.number or ''}"


def term_sums(facts: SpecFacts, diagonals: bool = False) -> tuple[TermSum, ...]:
    """The workspaces of the captured gradients that are wanted; `diagonals`: a block adds up those of its tiles."""
    return tuple(s for one in facts.captured_gradients for s in _of_one(one, diagonals))


def _of_one(gradient: CapturedGradient, diagonals: bool) -> list[TermSum]:
    place = PLACES[gradient.access]
    numbers = range(len(gradient.contributions))
    if place == "words":
        return [TermSum(gradient.name, place, tuple(numbers), diagonals=diagonals and gradient.access == "distance")]
    of_element: dict[Expr, list[int]] = {}
    for n in numbers:
        of_element.setdefault(gradient.contributions[n].element, []).append(n)
    several = len(of_element) > 1
    return [TermSum(gradient.name, place, tuple(r), several * (n + 1)) for n, r in enumerate(of_element.values())]


SIZE_OF_INDEX: dict[Expr, str] = dict(zip(INDEX_NAMES.values(), ("batch", "q_heads", "q_len", "kv_len"), strict=True))


def sizes_of_own_indices(captured: CapturedGradient) -> tuple[str, ...]:
    """The sizes of a captured tensor whose indices are b, h, q or k themselves, each at most once, in the same order in all
    reads; of other tensors none."""
    (indices, *others) = {read.indices for read in captured.contributions} or {()}
    are_own = not others and {*indices} <= {*SIZE_OF_INDEX} and len({*indices}) == len(indices)
    return tuple(SIZE_OF_INDEX[i] for i in indices) if are_own else ()


def sizes_of_pairs(captured: CapturedGradient) -> tuple[str, ...]:
    """The same of a captured tensor that has one element for each pair."""
    sizes = sizes_of_own_indices(captured)
    return sizes if len(sizes) == len(SIZE_OF_INDEX) else ()


def is_ds(captured: CapturedGradient) -> bool:
    """Whether the gradient of a captured tensor is dS of each pair, if the tensor has one element for each pair."""
    (read, *others) = captured.contributions or (None,)
    is_added = read is not None and not others and read.source == "score" and read.factor is FLOAT_ONE
    return is_added and bool(sizes_of_pairs(captured))
