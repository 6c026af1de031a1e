"""The scale of a call: one kernel for all positive ones, and the default as a constant.

A scale that multiplies each score costs an operation for each pair. One that is positive need not: the maximum of a row of Q
K^T belongs to the key with the largest score then, and the scale joins log2(e) in the factor of exponents. Whether a scale of
params is positive, only a call's numbers say. `clamp(scale, LEAST_SCALE, MOST_SCALE)` is positive whatever they are, and
changes no scale within these limits. Other scales, 0 and negative ones among them, keep the form of the spec. The default, 1
/ sqrt(head_dim), is a constant, also in calls that state it: nearly all calls have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from attngen.spec.attention import AttentionSpec
from attngen.spec.evaluate import Numbers, on_numbers
from attngen.spec.expr import Const, constant, names_in
from attngen.spec.operator import maximum, minimum

LEAST_SCALE, MOST_SCALE = 2.0**-60, 2.0**60  # for a scale that joins the exponent's factor: far from overflow with log2(e)
SOFTMAX_SCALE = "softmax_scale"  # the param of a scale that an argument states
SAME = 1e-15  # relative difference of two ways to compute the default

ScaleForm = Literal["stated", "positive", "default"]
FORMS: tuple[ScaleForm, ...] = ("stated", "positive", "default")


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim) (Vaswani et al. 2017)."""
    scale: float = float(max(head_dim, 1)) ** -0.5
    return scale


def has_scale_forms(spec: AttentionSpec) -> bool:
    """Whether the numbers of a call decide the form of the scale. No other normalization than softmax has exponents that a
    positive scale could join."""
    return spec.normalize == "softmax" and not isinstance(spec.scale, Const)


def scale_form(spec: AttentionSpec, params: Numbers) -> ScaleForm:
    """The form for a call with these params, of a spec that has forms."""
    try:
        (scale,) = _scale_of(spec)(params)
    except (ArithmeticError, ValueError):  # a division by 0, or NaN
        return "stated"
    if math.isclose(scale, default_scale(spec.head_dim), rel_tol=SAME):
        return "default"
    return "positive" if LEAST_SCALE <= scale <= MOST_SCALE else "stated"


def with_scale_form(spec: AttentionSpec, form: ScaleForm) -> AttentionSpec:
    """`spec` with its scale in this form, without params that nothing else reads."""
    if form == "stated":
        return spec
    if form == "positive":
        return replace(spec, scale=minimum(maximum(spec.scale, constant(LEAST_SCALE)), constant(MOST_SCALE)))
    others = [e for statement, e in spec.expressions.items() if statement != "scale"]
    read = names_in(*others, *(spec.rotary.positions if spec.rotary is not None else ()))
    params = tuple(p for p in spec.params if p.name in read or p.name not in names_in(spec.scale))
    return replace(spec, scale=constant(default_scale(spec.head_dim)), params=params)


@lru_cache(maxsize=1024)
def _scale_of(spec: AttentionSpec) -> Callable[[Numbers], tuple[float, ...]]:
    return on_numbers(spec.scale)
