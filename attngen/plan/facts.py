"""`SpecFacts`: what follows from a spec alone, computed once and passed along."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.diagnostics import DiagnosticError
from attngen.plan.affine_scores import AffineScore, affine_score
from attngen.plan.bounded_scores import constant_shift
from attngen.plan.captured_staging import Element, Staged, row_terms, staged
from attngen.plan.code_size import pair_cost
from attngen.plan.distances import distances_of_a_thread, divides_distances
from attngen.plan.mask_bounds import MaskBounds, mask_bounds
from attngen.plan.memo import remembered
from attngen.plan.uniform_score import uniform_score
from attngen.spec.attention import AttentionSpec
from attngen.spec.cost import MOST_OF_BACKWARD, OF_GRADIENT, OF_TENSOR, cost, too_much_code
from attngen.spec.expr import Expr
from attngen.spec.gradient import CapturedGradient, Gradient, gradient_of

DETERMINISTIC = False  # whether gradients have the same bits in every run, if neither a call nor torch's global switch says so


@dataclass(frozen=True, slots=True, eq=False)
class SpecFacts:
    """A spec, and what planning and emission know of it before a schedule is chosen."""

    spec: AttentionSpec
    bounds: MaskBounds  # for tiles of any size
    staged: Staged  # elements of captured tensors that are read once per key or per row
    row_terms: tuple[Element, ...]  # parts of the score that may be computed once per row; of a backward none
    uniform_score: Expr | None  # when the pairs of a tile have the score of its first pair, given `s`
    affine_score: AffineScore | None  # the score with its terms that are affine in k apart
    shift: float | None  # subtracted from the exponents (of 2) of all scores instead of a row maximum; None: needs a maximum
    pair_cost: int  # additions for the mask, the score and its derivative, as inlined code
    cost_beside_terms: int  # the same without those terms of rows
    divides_distances: bool  # by a number that is no constant
    wanted: tuple[str, ...] = ()  # the gradients that a backward computes, by the names of arguments; none: a forward
    gradient: Gradient | None = None  # backward only
    deterministic: bool = DETERMINISTIC  # gradients have the same bits in every run

    @property
    def captured_gradients(self) -> tuple[CapturedGradient, ...]:
        """Of the captured tensors and params whose gradients are wanted; of a forward none."""
        return tuple(one for one in self.gradient.captured if one.name in self.wanted) if self.gradient else ()

    def divided_distances(self, rows: int, block_kv: int) -> int:
        """The distances for which a thread keeps a remainder, see `distances_of_a_thread`."""
        return distances_of_a_thread(rows, block_kv) if self.divides_distances else 0


@remembered
def facts_of(spec: AttentionSpec, wanted: tuple[str, ...] = (), deterministic: bool = DETERMINISTIC) -> SpecFacts:
    """The facts of `spec` for its forward, or for a backward that computes the gradients `wanted`."""
    elements = staged(spec)
    gradient, uniform = _gradient(spec, wanted) if wanted else None, uniform_score(spec)
    terms = () if wanted or uniform is not None else row_terms(spec)  # a uniform score is that of a tile's first pair
    return SpecFacts(
        spec,
        mask_bounds(spec),
        elements,
        terms,
        uniform,
        affine_score(spec.score),
        constant_shift(spec),
        pair_cost(spec, elements, gradient),
        pair_cost(spec, replace(elements, terms=terms), gradient),
        divides_distances(spec),
        wanted,
        gradient,
        deterministic,
    )


def _gradient(spec: AttentionSpec, wanted: tuple[str, ...]) -> Gradient:
    """The derivatives of `spec`. Raises DiagnosticError if compilers would take too long for those that are wanted."""
    gradient = gradient_of(spec)
    contributions = [c for one in gradient.captured if one.name in wanted for c in one.contributions]
    factors = [e for c in contributions for e in (c.factor, *c.indices)]
    forward = [e for e in (spec.mask, spec.score, spec.sink) if e is not None]
    total = sum(map(cost, (*forward, gradient.ds, *factors))) + OF_TENSOR * len(spec.inputs) + OF_GRADIENT * len(contributions)
    if total > MOST_OF_BACKWARD:
        exprs = [gradient.ds, *factors]
        raise DiagnosticError(too_much_code("score", "gradient", exprs, MOST_OF_BACKWARD, total, backward=bool(factors)))
    return gradient
