"""The tables of `benchmarks/portable.py`, from made-up figures."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")


def row(case: str, ratio: float, **more: Any) -> dict[str, Any]:
    """FlashAttention-2 takes 2 ms at 300 TFLOP/s."""
    return {
        "case": case,
        "schedule": "fused_mma",
        "ms": {"attngen": 2 / ratio, "torch flash": 2.0},
        "tflops": {"attngen": 300 * ratio, "torch flash": 300.0},
        "ratio": ratio,
        "errors": {"attngen": 2e-4, "torch flash": 1e-4},
        **more,
    }


def test_plain_says_mean_and_least() -> None:
    plain = importlib.import_module("portable_parts.plain")
    fast = row("fast", 1.44)
    fast["tflops"]["torch cuDNN"] = 600.0
    text = plain.table([fast, row("slow", 1.0)])
    assert "| fast | 432 | 300 | 1.44 | 600 | 2.0e-04 | 1.0e-04 |" in text
    assert "| slow | 300 | 300 | 1.00 | - | 2.0e-04 | 1.0e-04 |" in text
    assert text.endswith("Schedule fused_mma. Measured: geometric mean of the ratios 1.200, least 1.000 (slow).")


def test_sizes_between_are_predicted_from_128_of_the_same_mask() -> None:
    between = importlib.import_module("portable_parts.between")
    full = [row("", 1.0, mask=None, head_dim=d, heads=2048 // d) for d in (128, 96)]
    causal = [row("", 2.0, mask="causal", head_dim=d, heads=2048 // d) for d in (128, 192)]
    text = between.table([*full, *causal])
    assert "| D128 full, 16 heads | 2.000 | 2.000 | 1.00 | 2.000 |" in text
    assert "| D96 full, 21 heads | 2.000 | 1.969 | 1.02 | 2.000 |" in text
    assert "| D192 causal, 10 heads | 1.000 | 0.938 | 1.07 | 2.000 |" in text


def test_sizes_between_are_measured_with_what_they_are_compared_with() -> None:
    between = importlib.import_module("portable_parts.between")
    known = {c.mask for c in between.CELLS if c.head_dim == between.KNOWN}
    assert {c.mask for c in between.CELLS} == known


def test_variants_say_share_and_ratio() -> None:
    variants = importlib.import_module("portable_parts.variants")
    text = variants.table([row("window", 1.5, share=0.81, tflops={"attngen": 300.0, "FlexAttention": 200.0})])
    assert "| window | 300 | 81% | 200 | 1.50 |" in text
