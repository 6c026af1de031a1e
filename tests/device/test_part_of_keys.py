"""Values that are columns of the keys, as in latent attention: one array, one gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
from attngen.device.arrays import ArgumentError
from attngen.diagnostics import DiagnosticError
from attngen.language import load_text
from attngen.reference.problems import Shape, sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import BF16, from_storage, round_to_storage
from attngen.spec.gradient import GradientError
from attngen.spec.print_attn import to_text
from tests import tiers
from tests.harness import compiled, run

SCHEDULES = [
    ("naive", None), ("tiled", None), ("fused", "sm_75"), ("fused", "sm_80"), ("decode", "sm_80"), ("wgmma", "sm_90a"),
    ("hopper", "sm_90a"),
]  # fmt: skip


def latent(begin: int = 0, end: int = 64, **more: Any) -> AttentionSpec:
    return attngen.define(**({"dtype": "bf16", "head_dim": 96, "values": (begin, end), "mask": "causal_bottom_right"} | more))


@pytest.mark.parametrize(("schedule", "arch"), tiers.cases(SCHEDULES, quick=[("fused", "sm_80")]))
@pytest.mark.parametrize("columns", [(0, 64), (24, 96)])
def test_against_the_oracle(schedule: str, arch: str | None, columns: tuple[int, int]) -> None:
    found = run(latent(*columns), schedule, Shape(2, 4, 1, 5 if schedule == "decode" else 70, 133), arch=arch)
    assert found.passed, found


@pytest.mark.parametrize("schedule", tiers.cases(["naive", "fused", "hopper"], quick=["naive"]))
def test_the_gradient_of_the_keys_has_that_of_the_values(schedule: str) -> None:
    """As the sum of the gradients of a kernel with K and V apart."""
    spec = latent(8, 72)
    apart = attngen.define(dtype="bf16", head_dim=96, head_dim_v=64, mask="causal_bottom_right")
    problem = sample(spec, Shape(1, 4, 2, 33, 40))
    v = np.ascontiguousarray(problem.k[..., 8:72])
    dout = round_to_storage(np.random.default_rng(1).standard_normal((1, 4, 33, 64)), BF16)
    found = compiled(spec, schedule).backward(dout, problem.q, problem.k)
    both = compiled(apart, schedule).backward(dout, problem.q, problem.k, v)
    assert list(found) == ["q", "k"]
    expected = from_storage(both["k"])
    expected[..., 8:72] += from_storage(both["v"])
    assert np.array_equal(found["q"], both["q"])
    assert np.array_equal(found["k"], round_to_storage(expected, BF16))
    alone = compiled(spec, schedule).backward(dout, problem.q, problem.k, wanted=("q",))
    assert list(alone) == ["q"]


def test_arrays_of_ml_dtypes() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    spec, rng = latent(), np.random.default_rng(0)
    q, k, dout = (rng.standard_normal((1, 2, 9, size)).astype(bfloat16) for size in (96, 96, 64))
    found = compiled(spec, "naive").backward(dout, q, k)
    assert found["k"].dtype == bfloat16
    assert np.isfinite(found["k"].astype(np.float32)).all()


def test_text_and_python_say_the_same() -> None:
    (spec,) = load_text("attention latent { dtype bf16  head_dim 96  values k[0:64]  mask causal_bottom_right }")
    assert spec == latent(name="latent")
    assert load_text(to_text(spec)) == (spec,)
    assert spec.head_dim_v == 64
    (typed,) = load_text("attention typed { dtype q bf16 k fp8_e4m3  head_dim 96  values k[0:64] }")
    assert typed.dtypes["v"].name == "fp8_e4m3"


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        ("values k[0:128]", "a row of K has the columns 0:64"),
        ("values k[8:8]", "a row of K has the columns 0:64"),
        ("values k[4:12]", "the first column is a multiple of 8"),
        ("values k[0:12]", "multiple of 8"),
        ("values v[0:8]", "`v` cannot stand here"),
        ("values k[0:32] values k[0:8]", "given twice"),
    ],
)
def test_columns_that_are_no_values_are_refused(statements: str, says: str) -> None:
    with pytest.raises(DiagnosticError) as refused:
        load_text(f"attention a {{ dtype bf16 head_dim 64 {statements} }}")
    assert says in str(refused.value)
    assert refused.value.diagnostics[0].span is not None


def test_another_size_or_type_of_values_is_refused() -> None:
    with pytest.raises(DiagnosticError, match="V has 32 columns"):
        load_text("attention a { dtype bf16 head_dim 64, v 32 values k[0:64] }")
    with pytest.raises(DiagnosticError, match="V is fp16, and K bf16"):
        load_text("attention a { dtype q bf16 v fp16 head_dim 64 values k[0:64] }")


def test_values_are_not_given() -> None:
    spec = latent()
    problem = sample(spec, Shape(1, 1, 1, 3, 3))
    kernel = compiled(spec, "naive")
    with pytest.raises(ArgumentError, match=r"`v` is k\[\.\.\., 0:64\] in this attention; leave it out"):
        kernel(problem.q, problem.k, problem.v)
    with pytest.raises(ArgumentError, match="`v` was not given"):
        compiled(attngen.define(dtype="bf16", head_dim=96), "naive")(problem.q, problem.k)
    with pytest.raises(GradientError, match="`v` has no gradient of its own: it is a part of k"):
        kernel.backward(kernel(problem.q, problem.k), problem.q, problem.k, wanted=("v",))
