"""Random specs emulated; `python -m tests.random_specs` searches further."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.language import load_text
from attngen.reference.compare import truth
from attngen.reference.definition import Rounding
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Draw, Shape, sample
from attngen.spec.dtypes import FP32, unit_roundoff
from attngen.spec.gradient import gradients_of_call
from tests import tiers
from tests.random_draws import Case, case
from tests.random_gradients import GradientCase, gradient_case, gradient_failure
from tests.random_lengths import Call
from tests.random_specs import failure


@pytest.mark.parametrize("seed", tiers.cases(range(60), quick=range(4), one_of=4))
def test_a_random_spec(seed: int) -> None:
    one = case(seed)
    assert not failure(one, seed), one


def test_bounds_of_one_row_are_not_small_by_chance() -> None:
    """A row of one key below a sink of 50: its weight is e^(s - 50), and s - 50 has half a unit in the last place of 50."""
    (spec,) = load_text("attention low { dtype fp32 head_dim 16 sink 50.0 }")
    for seed in range(10):
        expected = truth(spec, sample(spec, Shape(1, 1, 1, 1, 1), seed))
        largest = abs(expected.reference.output).max()
        assert 50 * unit_roundoff(FP32) * largest < expected.allowed < 500 * unit_roundoff(FP32) * largest


def test_bounds_of_the_few_rows_that_decide_are_not_small_by_chance() -> None:
    """Scores in the thousands: most rows have one weight of 1, and the errors of the few others decide."""
    text = "attention steep { dtype fp32 head_dim 112 heads 4 over 1 score s * 30.0 mask q >= k precision high }"
    (spec,) = load_text(text)
    for seed in range(3):
        problem = sample(spec, Shape(1, 4, 1, 128, 128), seed, Draw(magnitude=25.0))
        expected = truth(spec, problem)
        for other in range(100, 108):
            found = numpy_attention(spec, problem, rounding=Rounding(other)).output
            assert abs(found - expected.reference.output).max() < expected.allowed


def test_bounds_of_the_key_that_decides_are_not_small_by_chance() -> None:
    """One row, whose lse is the largest score: bounds are those of an error of this score, whichever key has it."""
    (spec,) = load_text("attention one { dtype fp32 head_dim 64 score s * 30.0 output lse precision high }")
    for seed in range(40):
        problem = sample(spec, Shape(1, 1, 1, 1, 100), seed, Draw(magnitude=4.0))
        expected = truth(spec, problem)
        assert expected.reference.lse is not None
        assert expected.allowed_lse > 1e-6 * abs(expected.reference.lse).max()


def test_draws_that_share_random_numbers_have_the_errors_of_their_seeds() -> None:
    (spec,) = load_text("attention two { dtype fp16 head_dim 16 mask q >= k }")
    problem = sample(spec, Shape(2, 2, 1, 7, 9))
    known: dict[tuple[object, ...], object] = {}
    for seed in range(9):
        shared, alone = (numpy_attention(spec, problem, rounding=Rounding(seed, shared=s)).output for s in (known, None))
        assert (shared == alone).all()
    assert len(known) == 4 + 3 * 4 * 4  # scores of each head; numbers for each four seeds, head, and kind of error


def once_wrong(lines: str, call: Call, schedule: str, arch: str, wanted: tuple[str, ...], **how: Any) -> GradientCase:
    one = Case(f"attention random {{\n{lines}\n}}\n", schedule, arch, (call,), False, how.pop("magnitude", 1.0), **how)
    _, computed = gradients_of_call(one.spec(), wanted)
    return GradientCase(one, one.spec(), schedule, arch, wanted, computed, deterministic=schedule == "fused", on_gpu=False)


ONCE_WRONG = {
    "a term of a pair that was not written": once_wrong(
        "dtype fp16 head_dim 64 heads 4 over 1 input extra: fp16[batch, heads, q_len, kv_len] score s + extra[b, h, q, k]",
        Call(Shape(1, 4, 1, 1, 1), (1,), (1,), {}), "fused", "sm_75", ("q", "extra"), magnitude=4.0,
    ),
    "NaN of a row at keys that it does not see, naive": once_wrong(
        "dtype bf16 head_dim 40, v 112 heads 2 over 2 param temp: float mask (k % 7 != 2)\n    score s * temp\n    sink 1.5",
        Call(Shape(1, 2, 2, 17, 64), (17,), (64,), {"temp": 0.7}), "naive", "sm_90a", ("k", "temp"),
    ),
    "NaN of a row at keys that it does not see, tiled": once_wrong(
        "dtype fp16 head_dim 128 input extra: fp16[batch, heads, q_len, kv_len] input cosines: fp32[197, 32]\n"
        "input sines: fp32[197, 32] mask (q // 16 == k // 16) score s + extra[b, h, q, k] sink 1.5\n"
        "    rotary 64 halves by cosines, sines",
        Call(Shape(1, 4, 2, 47, 69), (47,), (69,), {}), "tiled", "sm_75", ("k", "v", "extra"), extreme_sinks=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ONCE_WRONG)
def test_gradients_that_were_wrong_once(what: str) -> None:
    for seed in range(3):
        assert not gradient_failure(ONCE_WRONG[what], seed)


@pytest.mark.parametrize("seed", tiers.cases(range(36), quick=range(3), one_of=4))
def test_a_random_gradient(seed: int) -> None:
    one = gradient_case(seed)
    assert one is None or not gradient_failure(one, seed), one
