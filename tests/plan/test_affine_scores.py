"""The terms of a score that are affine in k, and their coefficients."""

from __future__ import annotations

import pytest

from attngen import define
from attngen.plan import ARCHES
from attngen.plan.affine_scores import affine_score
from attngen.schedules import choose
from attngen.spec.print_attn import expression_to_text


@pytest.mark.parametrize(
    ("score", "rest", "term", "slope"),
    [
        ("s + (q - k)", "s", "float(q - k)", "-1.0"),
        ("s - 0.5 * k", "s", "-(0.5 * float(k))", "-0.5"),
        ("alibi(slopes)", "s", "slopes[h] * float(k - q)", "slopes[h]"),
        ("softcap(20.0) + (3 * k - q) / 8.0", "20.0 * tanh(s / 20.0)", "float(3 * k - q) / 8.0", "0.375"),
        ("0.25 * k + s - slopes[h] * k", "s", "0.25 * float(k) + -(slopes[h] * float(k))", "0.25 + -slopes[h]"),
        ("s * temp + temp * (k + 7)", "s * temp", "temp * float(k + 7)", "temp"),
    ],
)
def test_terms_are_told_apart(score: str, rest: str, term: str, slope: str) -> None:
    params = {"temp": 0.5} if "temp" in score else {}
    inputs = {"slopes": ("fp32", ("heads",))} if "slopes" in score else {}
    found = affine_score(define(dtype="bf16", head_dim=64, score=score, inputs=inputs, params=params).score)
    assert found is not None
    assert tuple(map(expression_to_text, (found.rest, found.term, found.slope))) == (rest, term, slope)


@pytest.mark.parametrize(
    "score",
    [
        "s",
        "s + 0.1 * q",
        "s - 0.1 * abs(q - k)",
        "s + k // 2",
        "s + h * k",  # an integer's coefficient that is no constant
        "s * (k - q)",
        "s + by_row[h, q] * k",
        "s + (doc[b, k] - k)",
        "1.0 * (k - q)",  # no other term
    ],
)
def test_other_scores_have_none(score: str) -> None:
    inputs = {"by_row": ("fp32", ("heads", "q_len")), "doc": ("int32", ("batch", "kv_len"))}
    spec = define(dtype="bf16", head_dim=64, score=score, inputs={n: t for n, t in inputs.items() if n in score})
    assert affine_score(spec.score) is None


@pytest.mark.parametrize(
    ("score", "falls"),
    [
        ("s + (q - k)", True),
        ("s - 0.5 * k", True),
        ("s + slopes[h] * (q - k) / temp", True),
        ("s - temp * (2 * k - q)", True),
        ("s - (temp + 1.0) * k", True),
        ("s + (k - q)", False),
        ("s - temp * (q - k)", False),
        ("alibi(slopes)", False),
        ("s + 0.5 * k - slopes[h] * k", False),  # falls or rises, by the slope
        ("s", False),
    ],
)
def test_tiles_are_visited_from_the_highest_score(score: str, falls: bool) -> None:
    params = {"temp": 0.5} if "temp" in score else {}
    inputs = {"slopes": ("fp32", ("heads",))} if "slopes" in score else {}
    spec = define(dtype="bf16", head_dim=64, mask="causal", score=score, inputs=inputs, params=params)
    assert choose(spec, ARCHES["sm_90a"], "hopper").own.from_first_tile == falls
