"""Decisions that several schedules share, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.bounded_scores import score_bound
from attngen.plan.captured_staging import Staged
from attngen.plan.captured_sums import Place, TermSum
from attngen.plan.facts import SpecFacts
from attngen.plan.plan import Decision
from attngen.plan.precision import rough_functions
from attngen.plan.saved import Delta
from attngen.spec.expr import inputs_in
from attngen.spec.print_attn import shown


def score_decisions(facts: SpecFacts) -> Iterator[Decision]:
    """How scores are computed: by the GPU's own functions, once for a whole tile."""
    yield from rough_decisions(facts)
    if facts.uniform_score is not None:
        names = ", ".join(sorted(inputs_in(facts.spec.score)))
        yield Decision(f"elements of {names}", "one for a whole tile", "where the index is the same for all of its pairs")


def rough_decisions(facts: SpecFacts) -> Iterator[Decision]:
    """Whether scores are computed by the GPU's own functions."""
    if rough_functions(facts.spec):
        because = "`precision high` allows it: errors of O up to 1e-2 of its largest element"
        yield Decision("tanh of scores", "one instruction, wrong by up to 2^-11", because)


def row_term_decisions(staged: Staged) -> Iterator[Decision]:
    for term in staged.terms:
        yield Decision(shown(term.expr), "once per row", "it reads neither s nor k")


def maximum_decisions(facts: SpecFacts) -> Iterator[Decision]:
    if facts.shift is not None:
        because = f"scores lie within {score_bound(facts.spec):g} of 0: a constant keeps weights in range"
        yield Decision("maximum", "none", because)


def wanted_decision(facts: SpecFacts) -> Decision:
    """Which gradients a fused backward computes."""
    return Decision("gradients", ", ".join(facts.wanted), "other gradients are not computed")


def addition_decisions() -> Iterator[Decision]:
    """What follows if blocks that hold keys add to dQ."""
    because = "blocks that hold keys add their parts to fp32 sums in global memory: S and dP are computed once, five products"
    yield Decision("dQ", "additions", because)
    yield Decision("deterministic", "dK and dV alone", "blocks add to dQ in the order in which they happen to arrive")


def unfused_decisions(facts: SpecFacts, kept: tuple[str, ...]) -> Iterator[Decision]:
    """What backwards with scores in memory share; `kept` is what they keep there."""
    yield Decision("gradients", ", ".join(facts.wanted), "each by a kernel of its own: what is not wanted is not computed")
    yield Decision("weights", "recomputed", "by the kernels of the forward: nothing is saved between the two")
    yield Decision("in global memory", ", ".join(kept), "O(q_len * kv_len) bytes, which fused schedules avoid")


def saved_decisions(saved: tuple[str, ...]) -> Iterator[Decision]:
    if "lse" in saved:
        yield Decision(
            "weights", "recomputed", "from scores and the lse of their row, which the forward has saved: O(q_len) bytes"
        )
    if "lse_rest" in saved:
        yield Decision("lse", "lse + lse_rest", WHY_LSE_REST)


def delta_decisions(delta: Delta) -> Iterator[Decision]:
    if delta:
        yield Decision("delta", delta, WHY_DELTA[delta])


def term_decisions(terms: tuple[TermSum, ...]) -> Iterator[Decision]:
    """How the gradients of captured tensors are added up."""
    for t in {t.captured: t for t in terms}.values():
        yield Decision(f"d_{t.captured}", *(HOW_DIAGONALS if t.diagonals else HOW_SUMMED[t.place]))


HOW_SUMMED: dict[Place, tuple[str, str]] = {
    "rows": ("row by row", "the block that owns a row adds up its pairs, and a last kernel the rows: a fixed order"),
    "keys": ("key by key", "the block that owns a key adds up its pairs, and a last kernel the heads: a fixed order"),
    "pairs": (
        "pair by pair",
        "each pair writes its term, and a last kernel adds them up: O(q_len * kv_len) bytes, a fixed order",
    ),
    "words": (
        "without rounding",
        "by atomic additions of integers, whose order does not matter: which pairs meet is not known",
    ),
}
HOW_DIAGONALS = (
    "diagonal by diagonal",
    "its pairs read the same element: a block adds up those of a tile, atomic additions of integers those of all tiles",
)
WHY_DELTA: dict[Delta, str] = {
    "O and dO": "a sum over d: no key is visited",
    "sums over keys": "of P * dP in fp32, two products more: O is rounded to 16 bits, and sums over pairs add up that error",
}
WHY_LSE_REST = "one fp32 number cannot hold a large maximum and the logarithm of a sum beside it"
WHY_ROTATED = "it reads and writes rows of Q and K once; those of K would be rotated again for each block of rows"
WHY_PAIRS = "a warp copies those of a tile ahead, if rows begin at multiples of 16 bytes; else each pair reads its own"
