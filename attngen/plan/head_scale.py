"""The scale of a head: a factor of `s` that all pairs of a head share, such as the scale of its stored keys, joins the scale.

`score s * ks[b, h]` multiplies each score. As a part of the scale, the factor is computed once per work tile, and scores are
then those of the spec without it. Its sign is known in the kernel alone: a positive scale joins the factor of the exponent, by
any other (0, negative, infinite, NaN) each score is multiplied.
"""

from __future__ import annotations

from dataclasses import replace

from attngen.plan.facts import SpecFacts, facts_of
from attngen.plan.memo import remembered
from attngen.spec.attention import AttentionSpec, S
from attngen.spec.expr import Apply, Const, Expr, names_in, rewrite, walk
from attngen.spec.operator import FLOAT_ONE, apply

OF_PAIRS = {"s", "q", "k"}


def with_head_scale(spec: AttentionSpec) -> AttentionSpec:
    """`spec` with the factors of `s` that read neither s nor q nor k in its scale, which then may read b, h and inputs; `spec`
    itself if it has none but constants, or no softmax."""
    factors, score = _apart(spec.score)
    if spec.normalize != "softmax" or all(isinstance(factor, Const) for _, factor in factors):
        return spec
    return replace(spec, scale=_times(apply("float", spec.scale), factors), score=score)


@remembered
def facts_of_head_scale(facts: SpecFacts) -> SpecFacts:
    """The facts of that spec; `facts` themselves if it has no such factor."""
    spec = with_head_scale(facts.spec)
    return facts if spec is facts.spec else facts_of(spec, facts.wanted, facts.deterministic)


def head_factor(spec: AttentionSpec) -> Expr:
    """The product of these factors."""
    return _times(FLOAT_ONE, _apart(spec.score)[0])


def _apart(score: Expr) -> tuple[list[tuple[str, Expr]], Expr]:
    """The factors and divisors of `s`, each with its operator, and the score without them."""
    found = []
    while (product := _product_of(score)) is not None:
        found.append((product.op, _other(product)))
        without: dict[Expr, Expr] = {product: S}
        score = rewrite(score, without.get)
    return found, score


def _times(number: Expr, factors: list[tuple[str, Expr]]) -> Expr:
    for op, factor in factors:
        number = factor if (number, op) == (FLOAT_ONE, "mul") else apply(op, number, factor)
    return number


def _product_of(score: Expr) -> Apply | None:
    """The product, or quotient, of `s` and what all pairs of a head share, if the score reads `s` in it alone."""
    readers = [node for node in walk(score) if S in node.args]
    if len(readers) != 1 or not isinstance(reader := readers[0], Apply):
        return None
    is_product = reader.op == "mul" or (reader.op == "div" and reader.args[0] is S)
    return reader if is_product and not names_in(_other(reader)) & OF_PAIRS else None


def _other(product: Apply) -> Expr:
    """What `s` is multiplied with or divided by."""
    first, second = product.args
    return second if first is S else first
