"""An lse that is saved for the backward: O is computed as without it, and it is as exact as weights in 16 bits need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen import AttentionSpec
from attngen.api import CompiledAttention
from attngen.device.arrays import view
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.plan import ARCHES, Plan
from attngen.reference.compare import truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.schedules import choose
from tests import tiers
from tests.harness import compiled, wrong_gradients

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # for a weight that is rounded for P V
ALIBI = {"score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}}
SINKS = {"mask": "causal and window(40)", "sink": "sinks[h]", "inputs": {"sinks": ("fp32", ("heads",))}}
CASES: dict[str, dict[str, Any]] = {
    "sums by products": {},
    "no maximum": {"score": "softcap(20.0)"},
    "affine score": ALIBI,
    "sink": SINKS,
    "heaviest weights rounded": {"head_dim": 256},
    "fp16": {"dtype": "fp16"},
    "fused": {"kernel": "fused"},
}


def computed(spec: AttentionSpec, plan: Plan, problem: Sample) -> dict[str, Any]:
    device = EmulatedDevice(checked=False, arch="sm_90a")
    compiled = CompiledAttention(spec, plan, device.compile(emit(spec, plan)), device)
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}
    return compiled.run({name: view(array, name) for name, array in arrays.items()}, {})


@pytest.mark.parametrize("case", tiers.cases(list(CASES), quick=["sums by products"]))
def test_a_saved_lse_costs_the_softmax_nothing_and_suffices(case: str) -> None:
    spec = attngen.define(**{"dtype": "bf16", "head_dim": 64, "mask": "causal", **CASES[case]})
    problem = sample(spec, Shape(1, 2, 1, 90, 150))
    plain, saving = (choose(spec, ARCHES["sm_90a"], saves_lse=saves) for saves in (False, True))
    assert saving.own == plain.own
    found = computed(spec, saving, problem)
    assert list(found) == ["out", "lse", *(["lse_rest"] if "lse_rest" in saving.saved else [])]
    assert np.array_equal(found["out"], computed(spec, plain, problem)["out"])
    exact = truth(spec, problem, {}).reference.lse
    assert exact is not None
    assert np.abs(found["lse"] - exact).max() <= ROUNDOFF[spec.dtype.name]
    if "lse_rest" in saving.saved:  # less than half a unit in the last place of lse
        assert (np.abs(found["lse_rest"]) <= np.spacing(np.abs(found["lse"])) / 2).all()


def test_an_lse_of_the_user_stays_exact() -> None:
    """Its plan is the same whether or not the backward needs it too; only the rest is saved beside it."""
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal", lse=True)
    saving, plain = choose(spec, ARCHES["sm_90a"], saves_lse=True), choose(spec, ARCHES["sm_90a"])
    assert replace(saving, saved=(), decisions=plain.decisions) == plain
    bounded = attngen.define(dtype="bf16", head_dim=64, score="softcap(20.0)", lse=True)
    assert choose(bounded, ARCHES["sm_90a"], saves_lse=True) == choose(bounded, ARCHES["sm_90a"])
    assert choose(attngen.define(head_dim=64, normalize="sigmoid"), ARCHES["sm_80"], saves_lse=True).writes_lse is False


def test_bounds_of_dv_know_the_errors_of_a_saved_lse() -> None:
    """The gradient of V alone needs no O, but its weights follow from the forward's lse."""
    spec = attngen.define(dtype="fp32", head_dim=256, mask="k <= q % 2")
    kernel = compiled(spec, "fused", "sm_90a")
    for seed in range(3):
        problem = sample(spec, Shape(1, 1, 1, 52, 122), seed)
        large_scores = replace(problem, q=np.float32(25) * problem.q)
        assert not wrong_gradients(kernel, large_scores, ("v",), seed=seed), seed
