"""Scales of a call: positive ones in the exponent's factor, the default as a constant, any others as the spec states them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attngen
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const
from attngen.spec.scales import LEAST_SCALE, MOST_SCALE, default_scale, scale_form, with_scale_form
from tests import tiers
from tests.harness import cli, compiled, emitted, run, wrong_gradients

KERNELS = ("naive", "tiled", "fused", "wgmma", "hopper", "decode")
SIZE = 64
POSITIVE, OTHERS = (0.3, 1e-3, 50.0), (0.0, -0.7, 1e-30)
SHAPE = Shape(1, 2, 1, 70, 150)
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "sink": {"sink": "1.5", "lse": True},
    "soft-cap": {"mask": "causal", "score": "softcap(3.0)"},
    "bias": {"score": "s + 0.25 * k"},
}
EVERY = [(kernel, dtype, variant) for kernel in KERNELS for dtype in ("bf16", "fp16", "fp32") for variant in VARIANTS]
NONE_OF_FP32 = ("wgmma", "hopper")


def scaled(dtype: str = "bf16", **described: Any) -> AttentionSpec:
    return attngen.define(dtype=dtype, head_dim=SIZE, scale="t", params={"t": "float"}, **described)


def test_forms() -> None:
    """The numbers of a call select the form; the default is found by its value."""
    spec = scaled()
    assert [scale_form(spec, {"t": t}) for t in (0.3, LEAST_SCALE, MOST_SCALE)] == ["positive"] * 3
    assert [scale_form(spec, {"t": t}) for t in (0.0, -0.3, LEAST_SCALE / 2, MOST_SCALE * 2, float("nan"))] == ["stated"] * 5
    assert {scale_form(spec, {"t": t}) for t in (default_scale(SIZE), SIZE**-0.5, 0.125)} == {"default"}
    divided = attngen.define(dtype="bf16", head_dim=SIZE, scale="1 / t", params={"t": "float"})
    assert [scale_form(divided, {"t": t}) for t in (8.0, 2.0, 0.0)] == ["default", "positive", "stated"]
    read = attngen.define(dtype="bf16", head_dim=SIZE, scale="t * u", score="s + t", params={"t": "float", "u": "float"})
    constant = with_scale_form(read, "default")
    assert isinstance(constant.scale, Const)
    assert [p.name for p in constant.params] == ["t"]


@pytest.mark.parametrize("kernel", ["fused", "wgmma", "hopper", "decode"])
def test_a_positive_scale_is_no_operation_of_a_pair(kernel: str) -> None:
    arch = "sm_90a" if kernel in NONE_OF_FP32 else "sm_80"
    specs = with_scale_form(scaled(), "positive"), scaled(), attngen.define(dtype="bf16", head_dim=SIZE)
    positive, stated, constant = (emitted(spec, kernel, arch).text for spec in specs)
    assert "* softmax_scale;" in stated
    assert "* softmax_scale;" not in positive
    assert "* softmax_scale;" not in constant


@pytest.mark.parametrize(
    ("kernel", "dtype", "variant"),
    tiers.cases(
        EVERY,
        quick=lambda kernel, dtype, variant: (
            dtype == "bf16" and (kernel, variant) in (("hopper", "soft-cap"), ("decode", "sink"), ("fused", "soft-cap"))
        ),
        one_of=6,
    ),
)
def test_forwards(kernel: str, dtype: str, variant: str) -> None:
    if kernel in NONE_OF_FP32 and dtype == "fp32":
        pytest.skip("16 bits only")
    spec = scaled(dtype, **VARIANTS[variant])
    for t in (*POSITIVE, *OTHERS, default_scale(SIZE)):
        found = run(spec, kernel, SHAPE, t=t)
        assert found.passed, (t, found)


@pytest.mark.parametrize(
    ("kernel", "dtype", "variant"),
    tiers.cases(
        [one for one in EVERY if one[0] in ("naive", "tiled", "fused", "hopper")],
        quick=lambda kernel, dtype, variant: (kernel, dtype, variant) == ("fused", "fp16", "causal"),
        one_of=6,
    ),
)
def test_backwards(kernel: str, dtype: str, variant: str) -> None:
    if kernel in NONE_OF_FP32 and dtype == "fp32":
        pytest.skip("16 bits only")
    kernels = compiled(scaled(dtype, **VARIANTS[variant]), kernel)
    for t in (0.3, 0.0, -0.7, default_scale(SIZE)):
        assert not wrong_gradients(kernels, SHAPE, t=t), t


@pytest.mark.parametrize("kernel", ["naive", "fused"])
def test_the_gradient_of_a_scale_is_that_of_its_params(kernel: str) -> None:
    kernels = compiled(scaled(), kernel)
    for t in (0.3, -0.7):
        assert not wrong_gradients(kernels, Shape(1, 2, 1, 20, 30), ("t",), t=t), t
    assert not kernels.gradients(("t",)).by_scale


def test_check_checks_the_kernel_of_positive_scales_too(tmp_path: Path) -> None:
    path = tmp_path / "spec.attn"
    path.write_text("attention tempered { dtype fp16 head_dim 16 param t: float = 0.3 scale t }")
    done = cli("check", str(path), "--kernel", "naive", "--forward", "--q-len", "4", "--device", "emulated", "--json")
    assert done.exit_code == 0, done.output
    assert [one["attention"] for one in json.loads(done.stdout)] == ["tempered", "tempered_positive"]
