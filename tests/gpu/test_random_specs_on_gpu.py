"""Random specs on the GPU, on the schedules that it has; `tests/random_draws.py` says what they are made of."""

from __future__ import annotations

import pytest

from attngen.device.select import device_by_name
from attngen.inspect.checking import check_spec
from attngen.language import load_text
from attngen.reference.problems import Shape
from tests.random_draws import case
from tests.random_gradients import gradient_case, gradient_failure
from tests.random_specs import failure

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(60))
def test_a_random_spec(seed: int) -> None:
    one = case(seed)
    assert not failure(one, seed, device_by_name("cuda")), one


@pytest.mark.parametrize("seed", range(40))
def test_random_gradients(seed: int) -> None:
    one = gradient_case(seed, on_gpu=True)
    assert one is None or not gradient_failure(one, seed), one


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("schedule", ["fused", "wgmma", "hopper"])
def test_sinks_of_few_keys(schedule: str, head_dim: int, lse: bool) -> None:
    lines = f"dtype bf16 head_dim {head_dim} mask causal input sinks: fp32[heads] sink sinks[h]" + " output lse" * lse
    (spec,) = load_text(f"attention sinks {{ {lines} }}")
    (found,) = check_spec(spec, (schedule,), (device_by_name("cuda"),), Shape(2, 4, 2, 300, 300), {}, 0)
    assert found.comparison.passed, found
