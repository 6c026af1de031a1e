"""Floats of indices by steps: which are, and that they are the numbers of a conversion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attngen import define
from attngen.plan import ARCHES
from attngen.plan.index_steps import by_steps
from attngen.reference.problems import Shape, sample
from attngen.schedules import choose
from attngen.spec.print_attn import expression_to_text
from attngen.spec.ranges import element_ranges, name_ranges
from tests.harness import call, compiled, emitted

INPUTS = {"slopes": ("fp32", ("heads",)), "near": ("int32", ("batch",)), "doc": ("int32", ("batch", "kv_len"))}


def stepped(score: str) -> str:
    inputs = {n: t for n, t in INPUTS.items() if n in score}
    spec = define(dtype="bf16", head_dim=64, score=score, inputs=inputs, params={"n": 3} if "n)" in score else {})
    return expression_to_text(by_steps(spec.score, name_ranges(spec), element_ranges(spec)))


@pytest.mark.parametrize(
    ("score", "text"),
    [
        ("s + (q - k)", "s + (float(q.first - k.first) + float(q.step - k.step))"),
        ("s * slopes[h] * k", "s * slopes[h] * (float(k.first) + float(k.step))"),
        ("s * (3 * q - near[b] + n)", "s * (float(3 * q.first - near[b] + n) + float(3 * q.step))"),
        ("tanh(s + 0.5 * (q + 2 * k))", "tanh(s + 0.5 * (float(q.first + 2 * k.first) + float(q.step + 2 * k.step)))"),
    ],
)
def test_sums_of_indices(score: str, text: str) -> None:
    assert stepped(score) == text


@pytest.mark.parametrize(
    "score",
    [
        "s * near[b]",  # the same for all pairs
        "s * abs(q - k)",
        "s * (k // 2)",
        "s * (q * k)",
        "s * (doc[b, k] - k)",
        "s * (5000 * k)",  # steps beyond what is exact
        "where(float(q - k) > 3.0, s, s * (q - k))",  # a comparison reads the conversion, and the product the same
        "s * floor(k / 16.0)",
    ],
)
def test_other_floats_stay(score: str) -> None:
    assert ".first" not in stepped(score)


SIGNED = "s + where(float(q - k + n) >= 33554430.0, -1.0, 1.0) * (q - k + n + 0 * b)"  # two numbers before floats are 4 apart


@pytest.mark.long
def test_numbers_are_those_of_a_conversion() -> None:
    """O is the scores themselves: V is the identity, and weights are not normalized. The sign is that of a comparison."""
    spec = define(dtype="fp32", head_dim=8, head_dim_v=128, score=SIGNED, normalize="none", params={"n": 0})
    assert choose(spec, ARCHES["sm_75"], "fused").schedule.name == "fused_simt"
    assert "q_first" in emitted(spec, "fused", "sm_75").text
    problem = sample(spec, Shape(1, 1, 1, 70, 128))
    problem = replace(problem, q=np.zeros_like(problem.q), v=np.eye(128, dtype=np.float32)[None, None])
    distances = np.arange(70)[:, None] - np.arange(128)
    for n in (0, 2**24 - 200, 2**24 - 20, 2**25 - 20, 2**27 + 1):
        found = call(compiled(spec, "fused", "sm_75"), problem, n=n)[0][0, 0].astype(np.float64)
        exact = (distances + n).astype(np.float64)
        assert (np.signbit(found) == ((exact.astype(np.float32) >= 2**25 - 2) | (exact < 0))).all(), n
        beyond = np.abs(exact) > 2**24 - 128  # or a number of the tile is
        assert (np.abs(found) == np.abs(exact))[~beyond].all(), n
        assert (np.abs(np.abs(found) - np.abs(exact)) <= np.abs(exact) * 2.0**-23).all(), n
