"""The tables of `benchmarks/hopper.py`, from made-up figures."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.reference.problems import Shape, sample
from attngen.spec.dtypes import from_storage
from tests.harness import call, compiled

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")

CASES = ("bf16 one", "bf16 two", "fp16 one")


def part(name: str) -> ModuleType:
    return importlib.import_module(f"hopper_parts.{name}")


def compared(case: str, ratio: float, **more: Any) -> dict[str, Any]:
    rates = {"attngen": 100 * ratio, "torch cuDNN": 100.0, "FlexAttention": 100.0, "equal": 100.0}
    return {"case": case, "tflops": rates, "ratio": ratio, "share": ratio, **more}


def test_plain_says_mean_and_least_of_each_type() -> None:
    text = part("plain").table([compared(c, r) for c, r in zip(CASES, (1.0, 1.44, 1.1), strict=True)])
    assert "| bf16 two | 144 | 100 | 1.440 |" in text
    goal = "Goal: geometric mean of the ratios 1.20, each 1.07."
    seen = "Measured: bf16 geometric mean 1.200, least 1.000 (bf16 one); fp16 geometric mean 1.100, least 1.100 (fp16 one)."
    assert text.endswith(f"{goal} {seen}")


def test_sustained_compares_with_the_mean_of_before_and_after() -> None:
    sustained = part("sustained")
    assert sustained.ratio({"cuDNN before": 1.0, "attngen": 2.0, "cuDNN after": 2.0}) == 0.75
    rates = {"cuDNN before": 500.0, "attngen": 600.0, "cuDNN after": 480.0}
    text = sustained.table([{"case": "one", "tflops": rates, "ratio": 1.2}, {"case": "two", "tflops": rates, "ratio": 1.1}])
    assert "| one | 500 | 600 | 480 | 1.200 |" in text
    assert text.endswith("Goal: each ratio 1.08. Measured: geometric mean 1.149, least 1.100 (two).")


def test_grouped_has_no_figure_where_cudnn_takes_none() -> None:
    row = compared("one", 0.95, equal="other")
    alone = {**row, "case": "two", "share": 0.9, "tflops": {"attngen": 90.0, "equal": 100.0}}
    text = part("grouped").table([row, alone])
    assert "| one | 95 | 100 | other | 100 | 95.0% |" in text
    assert "| two | 90 | - | other | 100 | 90.0% |" in text
    assert "0.900 (two)" in text


def test_grouped_compares_as_much_work() -> None:
    for cell, equal in part("grouped").PAIRS:
        pairs = [c.operations(tuple(torch.empty(c.batch, c.heads, n, 1, device="meta") for n in (c.q_len, c.kv_len)))
                 if c.mask is None else c.batch * c.heads * sum(kept(c, i) for i in range(c.q_len)) * 4 * c.head_dim
                 for c in (cell, equal)]  # fmt: skip
        assert pairs[0] == pytest.approx(pairs[1], rel=0.07)


def kept(cell: Any, row: int) -> int:
    last = row + (cell.kv_len - cell.q_len if cell.mask == "causal_bottom_right" else 0)
    return min(max(last + 1, 0), cell.kv_len)


def test_variants_look_at_masks_alone_for_their_share() -> None:
    variants = part("variants")
    shares = {"ALiBi": 0.5, "window 1024": 0.9, "documents of 1024": 0.86, "prefix 1024": 0.95}
    text = variants.table([compared(name, share) for name, share in shares.items()])
    assert set(variants.MASKED) < set(importlib.import_module("portable_parts.variants").VARIANTS)
    assert "| documents of 1024 | 86 | 86% | 100 | 0.86 |" in text
    assert "the least share 0.860 (documents of 1024); over FlexAttention 0.500 (ALiBi)" in text


def test_changing_says_the_ratio() -> None:
    changing = part("changing")
    ms = {"attngen": 0.5, changing.EAGER: 2.0, changing.COMPILED: 0.75}
    text = changing.table([{"case": "one", "ms": ms, "ratios": {changing.EAGER: 4.1, changing.COMPILED: 1.5}}])
    assert "| one | 0.500 | 2.000 | 4.10 | 0.750 | 1.50 |" in text
    assert text.endswith(f"Goal: 3 times. Measured: 4.10 times {changing.EAGER}, 1.50 times {changing.COMPILED}.")


def test_sizes_are_predicted_on_straight_lines() -> None:
    sizes = part("sizes")
    known = {64: 400.0, 128: 600.0, 256: 800.0}
    assert [sizes.predicted(d, known) for d in (64, 96, 128, 160, 256)] == [400, 500, 600, 650, 800]
    with pytest.raises(ValueError, match="288"):
        sizes.predicted(288, known)
    square = importlib.import_module("cell").square
    assert sizes.mean_size(square("bf16", 192, None, 4096, 128)) == 160
    assert sizes.mean_size(square("bf16", 80, None, 4096)) == 80
    text = sizes.table([{"case": "one", "tflops": 450.0, "predicted": 500.0, "share": 0.9}])
    assert "| one | 450 | 500 | 90.0% |" in text
    assert "the least share 0.900 (one)" in text


def test_errors_and_sloping_maxima() -> None:
    errors = part("errors")
    compared = [errors.compared("one", {"attngen": 3e-4, "torch cuDNN": 2e-4}) | {"zero": True}]
    compared.append(errors.compared("two", {"attngen": 1e-4, "torch cuDNN": 2e-4}) | {"zero": False})
    times = [("three, growing", 1.1), ("three, falling", 1.2), ("four, growing", 1.0)]
    slower = [{"case": case, "ms": {"randn": 2.0, "sloping": 2 * ratio}, "slower": ratio} for case, ratio in times]
    text = errors.table([*compared, *slower])
    assert "| one | 3.0e-04 | 2.0e-04 | 1.50 |" in text
    assert "Measured: 1.500 (one); not all are." in text
    assert "| three, growing | 2.200 | 2.000 | 1.100 |" in text
    goal = "Goal: growing and falling maxima at most 1.15 of randn's time."
    assert text.endswith(f"{goal} Measured: 1.200 (three, falling).")
    exact = torch.zeros(3, dtype=torch.float64)
    assert errors.largest(torch.tensor([0.0, -0.5, 0.25]), exact) == 0.5
    assert errors.largest(torch.tensor([0.0, math.nan, 0.25]), exact) == math.inf


def test_dropout_says_the_least_share_of_the_forward() -> None:
    def row(case: str, share: float) -> dict[str, Any]:
        rates = {"with": 100 * share, "without": 100.0}
        return {
            "case": case,
            "tflops": dict.fromkeys(("forward", "backward"), rates),
            "share": {"forward": share, "backward": 0.5},
        }

    text = part("dropout").table([row("one", 0.9), row("two", 0.4)])
    assert "| one | 90 | 100 | 90.0% | 90 | 100 | 50.0% |" in text
    assert text.endswith("least share of the forward 0.400 (two); geometric means: forward 0.600, backward 0.500.")


def test_products_of_8_bits_beside_bf16_and_what_others_published() -> None:
    row = {
        "ratio": 1.2,
        "tflops": {"8 bits": 1163.4, "bf16": 750.0},
        "errors": {"8 bits": 0.0017, "bf16": 2e-4},
        "largest": 0.07,
    }
    text = part("products_of_8_bits").table([row | {"case": "one", "mark": 1150.0}, row | {"case": "two", "mark": None}])
    assert "| one | 1163 | 750 | 1.20 | 1.7e-03 | 2.0e-04 | 7.0e-02 |" in text
    assert text.endswith(
        "Goal, as published of others: one 1163 of 1150. Ratio to bf16: geometric mean 1.20, least 1.200 (one)."
    )


def test_fp32_beside_the_portable_kernel_and_torch() -> None:
    row = {
        "ratio": 1.8,
        "tflops": {"hopper": 104.4, "fused": 58.0, "efficient": 31.2},
        "errors": {"hopper": 3e-7, "fused": 4e-7, "efficient": 9e-7, "math": 6e-7},
    }
    rows = [row | {"case": "one", "goal": 100.0}, row | {"case": "two", "goal": 95.0}, row | {"case": "three", "goal": None}]
    text = part("fp32").table(rows)
    assert "| one | 104 | 58 | 31 | 1.80 | 3.0e-07 | 4.0e-07 | 9.0e-07 | 6.0e-07 |" in text
    assert text.endswith("Ratio to fused: geometric mean 1.80, least 1.800 (one).")
    found = part("fp32").marks(rows)
    assert [(mark.at, mark.goal, mark.measured, mark.is_met) for mark in found] == [
        ("one", 100.0, 104.4, True),
        ("two", 95.0, 104.4, True),
        ("one", 1.0, 0.5, True),
    ]


def test_sums_of_8_bits_in_one_level_are_those_of_the_same_kernel() -> None:
    """Its text has what the other form replaces, which computes the same where sums lose nothing, as on the emulated device."""
    sums = part("sums_of_8_bits")
    spec = attngen.define(dtype=sums.BYTES, head_dim=sums.SIZE)
    kernel = compiled(spec, "hopper", "sm_90a")
    problem = sample(spec, Shape(1, 1, 1, 3, 300))
    assert np.array_equal(*(from_storage(call(one, problem)[0]) for one in (kernel, sums.in_one_level(kernel))))
    row = {"case": "flat", "errors": {"two levels": 2.2e-4, "one level": 2.7e-4}, "largest": 0.0076}
    assert "| flat | 2.2e-04 | 2.7e-04 | 7.6e-03 |" in sums.table([row])
