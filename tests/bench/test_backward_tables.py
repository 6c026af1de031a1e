"""The tables of `benchmarks/backward.py`, from made-up figures."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")


def row(case: str, ratio: float, peer: str) -> dict[str, Any]:
    return {"case": case, "tflops": {"attngen": 300 * ratio, peer: 300.0}, "ratio": ratio, "peer": peer}


def test_plain_says_mean_and_least() -> None:
    plain = importlib.import_module("backward_parts.plain")
    text = plain.table([row("fast", 1.44, "torch cuDNN"), row("slow", 1.0, "torch cuDNN")])
    assert "| fast | 432 | 300 | 1.440 |" in text
    assert text.endswith("Measured: geometric mean 1.200, least 1.000 (slow).")


def test_grouped_heads_have_the_goals_of_plain_ones() -> None:
    grouped = importlib.import_module("backward_parts.grouped")
    mean, each = grouped.marks([row("fast", 1.44, "torch cuDNN"), row("slow", 1.0, "torch cuDNN")])
    assert (mean.goal, round(mean.measured, 3), mean.is_met) == (1.25, 1.2, False)
    assert (each.measured, each.at) == (1.0, "slow")
    assert {cell.title for cell in grouped.CELLS} >= {"bf16 D128 causal B1 H32 over 8 S4096"}


def test_portable_kernels_have_a_peer_by_element_type() -> None:
    portable = importlib.import_module("backward_parts.portable")
    text = portable.table([row("bf16", 1.5, "torch flash"), row("fp32", 1.2, "torch efficient")])
    assert text.count("Goal:") == 2
    assert "least 1.500 (bf16)" in text
    assert "least 1.200 (fp32)" in text


def test_variants_say_which_flex_attention_cannot_take() -> None:
    variants = importlib.import_module("backward_parts.variants")
    both = {"case": "full", "tflops": {"attngen": 600.0, "FlexAttention": 400.0}, "ratio": 1.5}
    text = variants.table([both, {"case": "causal", "tflops": {"attngen": 500.0}, "ratio": None}])
    assert "| full | 600 | 400 | 1.50 | 1.45 |" in text
    assert "| causal | 500 | - | - | 1.50 |" in text


def test_a_backward_counts_five_products() -> None:
    parts, cell = importlib.import_module("backward_parts"), importlib.import_module("cell")
    tensors = tuple(torch.zeros(1, 2, 8, 64) for _ in range(3))
    assert parts.operations(cell.Cell("bf16", 64, None, 1, 2, 8, 8), tensors) == 10 * 64 * 2 * 8 * 8


def test_errors_are_those_of_softmax_attention_in_float64() -> None:
    errors = importlib.import_module("backward_parts.errors")
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, 2, 5, 8) for _ in range(4))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    expected = torch.autograd.grad(out, leaves, gradient.double())
    for found, wanted in zip(errors.in_float64((q, k, v), gradient, True), expected, strict=True):
        torch.testing.assert_close(found, wanted)
