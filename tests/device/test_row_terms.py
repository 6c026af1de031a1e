"""Terms of the score that rows share: what reads neither s nor k is computed once per row, if it costs much."""

from __future__ import annotations

from typing import Any

import pytest

import attngen
from attngen.plan.captured_staging import row_terms
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.print_attn import expression_to_text
from tests import tiers
from tests.harness import emitted, run

SCHEDULES = (("decode", "sm_80"), ("decode", "sm_90a"), ("fused", "sm_80"), ("hopper", "sm_90a"))
VARIANTS: dict[str, dict[str, Any]] = {
    "slopes by formula": {"score": "s + pow(2.0, -8.0 * (h + 1) / heads) * (k - q)", "mask": "causal_bottom_right"},
    "of rows": {"score": "s * log(2.0 + q + kv_len - q_len) + sin(0.5 * q + h)"},
    "beside elements": {
        "score": "softcap(20.0) + sqrt(x[b, h, q] * x[b, h, q] + 1.0) * y[b, k]",
        "inputs": {"x": ("fp32", ("batch", "heads", "q_len")), "y": ("fp32", ("batch", "kv_len"))},
    },
    "of heads": {"score": "s + exp(x[b, h]) * (k - q)", "inputs": {"x": ("fp32", ("batch", "heads"))}, "lse": True},
    "of a mask too": {
        "score": "s + x[b, h] * 3.0 * k / kv_len", "mask": "same_document(d) and causal",
        "inputs": {"x": ("fp32", ("batch", "heads")), "d": ("int32", ("batch", "kv_len"))},
    },
}  # fmt: skip
EVERY = [(*s, variant) for s in SCHEDULES for variant in VARIANTS]


def of_variant(variant: str, **more: Any) -> AttentionSpec:
    return attngen.define(**({"dtype": "bf16", "head_dim": 64} | VARIANTS[variant] | more))


@pytest.mark.parametrize(
    ("score", "terms"),
    [
        ("s + pow(2.0, -h) * (k - q)", ["pow(2.0, float(-h))"]),
        ("s * log(1.0 + q) + x[h] * k", ["log(1.0 + float(q))"]),
        ("s + x[h] * k", []),
        ("s + sin(1.0 * k) + sin(s) + x[h]", []),
        ("s + sin(x[h]) + cos(q * k)", ["sin(x[h])"]),
    ],
)
def test_which_parts_of_a_score_are_terms(score: str, terms: list[str]) -> None:
    inputs = {"x": ("fp32", ("heads",))} if "x[" in score else {}
    spec = attngen.define(dtype="bf16", head_dim=64, score=score, inputs=inputs)
    assert [expression_to_text(t.expr) for t in row_terms(spec)] == terms


@pytest.mark.parametrize(("kernel", "arch"), SCHEDULES)
def test_a_slope_is_computed_once_per_row(kernel: str, arch: str) -> None:
    text = emitted(of_variant("slopes by formula"), kernel, arch).text
    assert text.count("powf(") == 1
    assert "called_pow" not in text


@pytest.mark.parametrize(
    ("kernel", "arch", "variant"),
    tiers.cases(EVERY, quick=[("hopper", "sm_90a", "slopes by formula"), ("decode", "sm_80", "beside elements")], one_of=4),
)
def test_terms(kernel: str, arch: str, variant: str) -> None:
    shape = Shape(2, 4, 2, 9 if kernel == "decode" else 140, 150)
    found = run(of_variant(variant), kernel, shape, arch=arch)
    assert found.passed, found
