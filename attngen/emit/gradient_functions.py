"""The device functions of a captured tensor's gradient: which element a pair adds to, and with which factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from attngen.emit.cuda_text import c_name
from attngen.spec.expr import Expr, names_in
from attngen.spec.gradient import INDEX_NAMES, CapturedGradient, Contribution, Source
from attngen.spec.operator import FLOAT_ONE
from attngen.spec.print_attn import shown

F = TypeVar("F")  # attngen.emit.variant.Function


@dataclass(frozen=True, slots=True)
class IndexFunction(Generic[F]):
    """The index of dimension `dim` of the element that a pair reads."""

    dim: int
    name: str
    function: F
    what: str  # as the language writes it


@dataclass(frozen=True, slots=True)
class ContributionFunctions(Generic[F]):
    """One read of a captured tensor: `indices` has those that are not `CapturedFunctions.own`."""

    source: Source
    name: str  # name of the factor's function
    factor: F | None  # None: 1
    what: str  # the factor, as the language writes it
    element: str  # the element that is read, as the language writes it
    indices: tuple[IndexFunction[F], ...]
    reads_s: bool


@dataclass(frozen=True, slots=True)
class CapturedFunctions(Generic[F]):
    """The gradient of one captured tensor or param.

    `own` are the dimensions whose index is b, h, q or k itself in every read: all pairs that add to an element have its index.
    """

    gradient: CapturedGradient
    name: str  # in CUDA
    own: dict[str, int]  # the dimension, by the name of the index
    contributions: tuple[ContributionFunctions[F], ...]

    def of(self, *sources: Source) -> tuple[ContributionFunctions[F], ...]:
        return tuple(c for c in self.contributions if c.source in sources)

    def reads(self, *sources: Source) -> bool:
        return bool(self.of(*sources))

    @property
    def reads_s(self) -> bool:
        return any(c.reads_s for c in self.contributions)

    @property
    def functions(self) -> tuple[F, ...]:
        every = [f for c in self.contributions for f in (c.factor, *(i.function for i in c.indices))]
        return tuple(f for f in every if f is not None)


def captured_functions(gradient: CapturedGradient, function: Callable[[Expr], F]) -> CapturedFunctions[F]:
    """The functions of one captured gradient; `function` prints an expression."""
    own = own_indices(gradient)
    several = len(gradient.contributions) > 1
    name = c_name(gradient.name)
    return CapturedFunctions(
        gradient,
        name,
        own,
        tuple(
            _contribution(c, f"{name}_{n}" if several else name, own, function) for n, c in enumerate(gradient.contributions, 1)
        ),
    )


def own_indices(gradient: CapturedGradient) -> dict[str, int]:
    """The dimensions of a captured tensor that every read indexes by b, h, q or k itself."""
    reads = [c.indices for c in gradient.contributions]
    found: dict[str, int] = {}
    for name, index in INDEX_NAMES.items():
        for dim in range(len(reads[0]) if reads else 0):
            if all(indices[dim] is index for indices in reads):
                found.setdefault(name, dim)
    return found


def _contribution(
    contribution: Contribution, name: str, own: dict[str, int], function: Callable[[Expr], F]
) -> ContributionFunctions[F]:
    factor, dims = contribution.factor, own.values()
    return ContributionFunctions(
        contribution.source,
        f"{name}_factor",
        None if factor is FLOAT_ONE else function(factor),
        shown(factor),
        shown(contribution.element),
        tuple(
            IndexFunction(dim, f"{name}_index_{dim}", function(index), shown(index))
            for dim, index in enumerate(contribution.indices)
            if dim not in dims
        ),
        "s" in names_in(factor, *contribution.indices),
    )
