"""What a backward that recomputes the weights reads of the forward's results."""

from __future__ import annotations

from typing import Literal

from attngen.plan.bounded_scores import may_be_large
from attngen.plan.captured_sums import term_sums
from attngen.plan.facts import SpecFacts
from attngen.spec.attention import AttentionSpec

Delta = Literal["O and dO", "sums over keys", ""]  # what delta is computed from; the last: it is not needed
Dq = Literal["own kernel", "additions", ""]  # who adds up dQ; the last: it is not wanted


def needs_lse_rest(spec: AttentionSpec) -> bool:
    """Whether an lse is saved as the sum of two fp32 numbers.

    P = exp(S - lse). With scores of -1e38, as additive masks have them, lse is one of them plus the logarithm of a sum, which
    is less than half a unit in its last place: one number loses it, and the weights of a row add up to the number of its keys.
    Of fp32 it is always saved: the rounding of lse is an error of all weights of a row alike, which sums do not average out.
    """
    return spec.normalize == "softmax" and (spec.dtype.bytes == 4 or may_be_large(spec))


def delta_of(facts: SpecFacts) -> Delta:
    """What a backward with O(S) memory computes delta from.

    The sum over d of dO * O costs one read of both. In 16 bits, O is rounded, and so are the weights that tensor cores multiply
    by V. All pairs of a row have that error of delta, and gradients of captured tensors, which are sums over pairs, add it up.
    For these, delta is the sum over keys of P * dP in fp32.
    """
    captured = bool(term_sums(facts))
    if facts.spec.normalize != "softmax" or not (captured or {"q", "k"} & {*facts.wanted}):
        return ""
    return "sums over keys" if facts.spec.dtype.bytes == 2 and _shows_rounding(facts) else "O and dO"


def _shows_rounding(facts: SpecFacts) -> bool:
    """Whether a wanted gradient of a captured tensor shows the rounding of O.

    Those of a sink and of a bias of all pairs, in the type of O, do not: they are sums with one term for each row, or for each
    pair, and are rounded to that type.
    """
    types = {one.name: one.dtype for one in facts.spec.inputs}
    return any(
        not (c.source == "sink" or one.access == "pair") or types.get(one.name) != facts.spec.dtype
        for one in facts.captured_gradients
        for c in one.contributions
    )


def row_workspaces(facts: SpecFacts) -> dict[str, str]:
    """The workspaces with a number for each row that the kernel of delta writes, by the names of these numbers.

    Where that kernel visits all keys, it also has the sum of the weights as this backward recomputes them, which is 1 only as
    far as lse is exact: some forwards add up rounded weights. Its logarithm is added to the number that is subtracted last.
    """
    delta = delta_of(facts)
    last = "lse_rest" if needs_lse_rest(facts.spec) else "lse"
    return ({"delta": "delta"} if delta else {}) | ({last: f"own_{last}"} if delta == "sums over keys" else {})


def saved_results(facts: SpecFacts) -> tuple[str, ...]:
    """The results of the forward, by the names of arguments, that a backward with O(S) memory reads."""
    spec = facts.spec
    if spec.normalize != "softmax":
        return ()
    out = ("out",) if delta_of(facts) == "O and dO" else ()
    return (*out, "lse", *(("lse_rest",) if needs_lse_rest(spec) else ()))


def row_values(facts: SpecFacts) -> tuple[str, ...]:
    """The numbers that each row has for itself."""
    return (*(n for n in saved_results(facts) if n != "out"), *(["delta"] if delta_of(facts) else []))
