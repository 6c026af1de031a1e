"""Scores that bound themselves, as a soft-cap's do: their exponentials need no maximum.

The maximum that a softmax subtracts keeps exponentials within the range of their type. A score `c * tanh(...)` lies within
[-c, c] by itself, so that one constant serves all rows: nothing is compared, and nothing that was summed is rescaled.
"""

from __future__ import annotations

import math

from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Apply, Const, Expr
from attngen.spec.operator import TABLE

LEAST = -100.0  # log2 of a weight: bf16 and fp32 have 26 octaves below it, for V's elements
RESCALE_EXPONENT = 8.0  # by so many powers of 2 a weight may exceed 1 before a raised maximum is used: sums are rescaled then
LARGE_EXPONENT = 2.0**16  # exponents of 2 up to it have a rounding error of 2^-9 at most
MOST = 10.0  # and 117 above it, for V's elements and the number of keys: as many as weights of a kept maximum leave


def constant_shift(spec: AttentionSpec) -> float | None:
    """What to subtract from the exponents (of 2) of all scores instead of a row's maximum; None where a maximum is needed.

    Of bf16 only: fp16 has not the range. Weights lie between 2^LEAST and 2^MOST then, and are at most 1 where they can be.
    """
    bound = score_bound(spec)
    if bound is None or spec.dtype.name != "bf16" or spec.normalize != "softmax" or spec.sink is not None or spec.lse:
        return None
    octaves = bound / math.log(2)
    most = max(0.0, 2 * octaves + LEAST)
    return round(octaves - most, 2) if most <= MOST else None


def score_bound(spec: AttentionSpec) -> float | None:
    """The least number that no score's magnitude exceeds, where its outermost operators tell: `c * f(...)` of a bounded f."""
    return bound_of(spec.score)


def bound_of(score: Expr) -> float | None:
    """`score_bound` of a spec with this score."""
    factor = 1.0
    if isinstance(score, Apply) and score.op == "mul":
        for constant, rest in (score.args, score.args[::-1]):
            if isinstance(constant, Const):
                factor, score = abs(float(constant.value)), rest
                break
    within = TABLE[score.op].within if isinstance(score, Apply) else None
    return None if within is None else factor * max(map(abs, within))


def may_be_large(spec: AttentionSpec) -> bool:
    """Whether a score or a sink may be so far from 0 that its product with log2(e) is too coarse for a weight."""
    bound = score_bound(spec)
    return spec.sink is not None or bound is None or bound > LARGE_EXPONENT / 2
