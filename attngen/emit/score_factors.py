"""Factors of scores: a constant factor joins the exponent's, and the scale may join the score's own constants."""

from __future__ import annotations

import math

from attngen.emit.cuda_text import SCALE, CudaPrinter, literal, times_factor
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import MAX_FLOAT, Apply, Const, Expr, constant, rewrite, walk
from attngen.spec.operator import TABLE, mul
from attngen.spec.scales import LEAST_SCALE, MOST_SCALE


def without_factor(spec: AttentionSpec, score: Expr | None, head_scale: bool = False) -> tuple[str, Expr | None]:
    """A positive factor by which all scores are multiplied, as text, and the score without it. With a `head_scale`, the kernel
    asks whether the scale is positive."""
    if spec.normalize != "softmax":
        return "", score
    if score is None:
        return ("softmax_scale" if head_scale or _may_join_exponent(spec.scale) else ""), None
    if spec.dtype.bytes == 2 and isinstance(score, Apply) and score.op == "mul":
        for constant, rest in (score.args, score.args[::-1]):
            if isinstance(constant, Const) and _may_join_exponent(constant):
                return literal(constant)[0], rest
    return "", score


def _may_join_exponent(factor: Expr) -> bool:
    """Whether `factor` is positive, and its product with log2(e), and what is divided by it, is far from overflow: a constant,
    or limited by constants, whatever a param is."""
    least, most = _limits(factor)
    return least >= LEAST_SCALE and most <= MOST_SCALE


def _limits(factor: Expr) -> tuple[float, float]:
    """Limits of a float, as constants and the minima and maxima with constants give them."""
    if isinstance(factor, Const):
        return float(factor.value), float(factor.value)
    if isinstance(factor, Apply) and factor.op in ("min", "max"):
        (a, b), (c, d) = map(_limits, factor.args)
        return (min(a, c), min(b, d)) if factor.op == "min" else (max(a, c), max(b, d))
    return -math.inf, math.inf


def of_raw_scores(score: Expr | None, scale: Expr) -> Expr | None:
    """`score` as a function of Q K^T without the scale, if a constant multiplies each `s` and can include it; else None."""
    if score is None or not (isinstance(scale, Const) or _may_join_exponent(scale)):
        return None
    taken = 0

    def take(node: Expr) -> Expr | None:
        nonlocal taken
        if isinstance(node, Apply) and node.op in ("mul", "div") and node.args[0] is S and isinstance(node.args[1], Const):
            by, most = float(node.args[1].value), float(scale.value) if isinstance(scale, Const) else MOST_SCALE
            factor = most * by if node.op == "mul" else most / by if by else math.inf
            if not abs(factor) <= MAX_FLOAT:
                return None
            taken += 1
            if isinstance(scale, Const):
                return mul(S, constant(factor))
            return mul(S, mul(SCALE, constant(by if node.op == "mul" else 1.0 / by)))
        return None

    found = rewrite(score, take)
    parents = sum(node.args.count(S) for node in walk(score))
    return found if taken == parents > 0 else None


def score_of_two(printer: CudaPrinter, score: Expr | None) -> str:
    """The call that computes two scores at once, for less than twice the cost of one; "" if the outermost operator has none."""
    if printer.approximate != "fast" or not isinstance(score, Apply):
        return ""
    primitive, operand = TABLE[score.op].fast_of_two, times_factor(score.args[0])
    if not primitive or operand is None or operand[0] is not S:
        return ""
    return f"{primitive}(s0, s1, {printer.print(operand[1], share=False).results[0]})"
