"""Tiles whose pairs read the same elements, against brute force, and the kernels that use it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.language import load_text
from attngen.plan.uniform_score import uniform_score
from attngen.reference.problems import Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.evaluate import evaluate
from tests import tiers
from tests.harness import emitted, run

STOPS = {
    "by distance": "relative_bias(table, 3)",
    "before only": "s + table[h, clamp(k - q, -5, 0) + 5]",
    "in steps": "s * table[h, clamp((q - k) // 4, 0, 6)]",
    "two elements": "s + table[h, clamp(k - q, -2, 2) + 3] * table[0, clamp(q + k, 4, 9)]",
    "found in data": "s + table[h, clamp(ids[clamp(k, 2, 9)], 0, 12)]",
    "data and distance": "s + table[h, clamp(ids[clamp(q, 2, 9)] + clamp(k - q, -3, 3), 0, 12)]",
    "up to a param": "s + table[h, clamp(k - q, -far, far) + 6]",
}
GOES_ON = {
    "no element": "s + 0.5 * clamp(k - q, -3, 3)",
    "one for each head": "s + table[h, 2]",
    "by row": "s + table[h, q % 13]",
    "also by distance": "relative_bias(table, 3) + 0.1 * (k - q)",
    "without end": "s + table[h, clamp(k - q, -3, 3) + q]",
    "found in data of its own": "s + table[h, clamp(ids[k], 0, 9)]",
}


def spec_of(score: str, head_dim: int = 16) -> AttentionSpec:
    declared = {"far": "param far: int = 2", "table": "input table: fp32[heads, 13]", "ids": "input ids: int32[kv_len]"}
    lines = [line for name, line in declared.items() if name in score]
    return load_text("\n".join(["attention a {", "dtype bf16", f"head_dim {head_dim}", *lines, f"score {score}", "}"]))[0]


@pytest.mark.parametrize("score", STOPS.values(), ids=STOPS.keys())
@given(q=st.integers(0, 40), rows=st.integers(1, 8), k=st.integers(0, 40), keys=st.integers(1, 8), far=st.integers(0, 4))
def test_where_it_is_true_all_pairs_read_the_same(score: str, q: int, rows: int, k: int, keys: int, far: int) -> None:
    spec = spec_of(score)
    condition = uniform_score(spec)
    assert condition is not None
    table = np.random.default_rng(0).permutation(26.0 * np.arange(26)).reshape(2, 13)
    ids = np.random.default_rng(1).integers(0, 13, 64)
    names = {"s": 1.5, "h": 1, "b": 0, "far": far, "q.lo": q, "q.hi": q + rows - 1, "k.lo": k, "k.hi": k + keys - 1}

    def read(tensor: str, at: tuple) -> np.ndarray:
        return (ids if tensor == "ids" else table)[tuple(map(np.asarray, at))]

    pairs = {"q": np.arange(q, q + rows)[:, None], "k": np.arange(k, k + keys)[None, :]}
    scores = np.broadcast_to(evaluate(spec.score, {**names, **pairs}, read, np), (rows, keys))
    if evaluate(condition, names, read, np):
        assert (scores == scores[0, 0]).all()
    elif score == STOPS["by distance"]:  # exact where the index is one bounded distance
        assert (scores != scores[0, 0]).any()


@pytest.mark.parametrize("score", GOES_ON.values(), ids=GOES_ON.keys())
def test_a_score_that_is_never_one_has_no_test(score: str) -> None:
    assert uniform_score(spec_of(score)) is None


@pytest.mark.parametrize("schedule", tiers.cases(["tiled", "fused", "wgmma", "hopper"], quick=["fused", "hopper"]))
def test_far_tiles_read_one_element(schedule: str) -> None:
    """Lengths at which most tiles are far from the diagonal, on both of its sides."""
    spec = spec_of(STOPS["by distance"], 64)
    assert "one_score(q_lo" in emitted(spec, schedule, "sm_90a").text
    assert run(spec, schedule, Shape(batch=1, q_heads=2, kv_heads=2, q_len=400, kv_len=333), arch="sm_90a").passed
