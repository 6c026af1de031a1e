"""Random specs emulated; `python -m tests.random_specs` searches further."""

from __future__ import annotations

import pytest

from tests import tiers
from tests.random_gradients import gradient_case, gradient_failure
from tests.random_specs import case, failure


@pytest.mark.parametrize("seed", tiers.cases(range(140), quick=range(12)))
def test_a_random_spec(seed: int) -> None:
    one = case(seed)
    assert not failure(one, seed), one


@pytest.mark.parametrize("seed", tiers.cases(range(45), quick=range(3)))
def test_a_random_gradient(seed: int) -> None:
    one = gradient_case(seed)
    assert one is None or not gradient_failure(one, seed), one
