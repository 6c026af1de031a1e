"""What a backward that recomputes the weights reads of the forward's results."""

from __future__ import annotations

from attngen.plan.bounded_scores import may_be_large
from attngen.plan.facts import SpecFacts
from attngen.spec.attention import AttentionSpec


def needs_lse_rest(spec: AttentionSpec) -> bool:
    """Whether an lse is saved as the sum of two fp32 numbers.

    P = exp(S - lse). With scores of -1e38, as additive masks have them, lse is one of them plus the logarithm of a sum, which
    is less than half a unit in its last place: one number loses it, and the weights of a row add up to the number of its keys.
    Of fp32 it is always saved: the rounding of lse is an error of all weights of a row alike, which sums do not average out.
    """
    return spec.normalize == "softmax" and (spec.dtype.bytes == 4 or may_be_large(spec))


def saved_results(facts: SpecFacts) -> tuple[str, ...]:
    """The results of the forward, by the names of arguments, that a backward with O(S) memory reads."""
    spec = facts.spec
    if spec.normalize != "softmax":
        return ()
    out = ("out",) if set(facts.wanted) - {"v"} else ()
    return (*out, "lse", *(("lse_rest",) if needs_lse_rest(spec) else ()))
