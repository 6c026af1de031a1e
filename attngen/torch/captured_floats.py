"""The floats that a score closes over, as params: a score that differs in them alone needs no other kernel.

They stay constants where these buy something: a bound of the score, as that of a soft-cap, with which kernels need no maximum
of rows; and in indices, whose limits are known then. A factor of the whole score joins the scale, which costs nothing. A
divisor becomes a factor, its reciprocal, as a division takes some twenty instructions; except below comparisons and
roundings, where the least error may be a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attngen.emit.cuda_text import below_steps
from attngen.plan.bounded_scores import bound_of
from attngen.spec.attention import S
from attngen.spec.expr import Apply, Const, Expr, Gather, Name, Type, constant, name, names_in, rewrite, walk
from attngen.spec.operator import mul

LEAST_DIVISOR, MOST_DIVISOR = 1e-30, 1e30  # their reciprocals are normal numbers of fp32


@dataclass(frozen=True)
class OfParams:
    """A score, what the scale is multiplied by, and the values of the params that the score reads, by name."""

    score: Expr
    factor: float
    values: Mapping[str, float]


def of_params(score: Expr, values: Mapping[str, float], unused_name: Callable[[str], str]) -> OfParams:
    """`score` with those of its params, which have `values`, that need not be constants; the others are."""
    fixed = with_constants(score, values)
    if (factor := _factor(fixed)) is not None:
        return OfParams(S, factor, {})
    if bound_of(fixed) is not None:
        return OfParams(fixed, 1.0, {})
    in_indices = names_in(*(index for node in walk(score) if isinstance(node, Gather) for index in node.args))
    score = with_constants(score, {n: value for n, value in values.items() if n in in_indices})
    exact, inverses = below_steps((score,)), dict[str, str]()

    def multiplied(node: Expr) -> Expr | None:
        if not isinstance(node, Apply) or node.op != "div" or node in exact:
            return None
        dividend, divisor = node.args
        if not isinstance(divisor, Name) or not LEAST_DIVISOR < abs(values.get(divisor.name, 0.0)) < MOST_DIVISOR:
            return None
        if divisor.name not in inverses:
            inverses[divisor.name] = unused_name(divisor.name)
        return mul(rewrite(dividend, multiplied), name(inverses[divisor.name], Type.FLOAT))

    found = rewrite(score, multiplied)
    every = {**values, **{inverse: 1.0 / values[of] for of, inverse in inverses.items()}}
    return OfParams(found, 1.0, {n: value for n, value in every.items() if n in names_in(found)})


def with_constants(expr: Expr, values: Mapping[str, float]) -> Expr:
    """`expr` with these params as constants."""
    return rewrite(expr, lambda node: constant(values[node.name]) if isinstance(node, Name) and node.name in values else None)


def _factor(score: Expr) -> float | None:
    """The constant that `s` is multiplied by, if that is all; None otherwise."""
    if isinstance(score, Apply) and score.op in ("mul", "div"):
        first, second = score.args
        if first is S and isinstance(second, Const) and second.value:
            return float(second.value) if score.op == "mul" else 1.0 / float(second.value)
    return None
