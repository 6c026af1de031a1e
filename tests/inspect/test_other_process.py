"""The second process of a check."""

import os

import numpy as np
import pytest

from attngen.inspect.known import FEW_DRAWS, Known
from attngen.inspect.other_process import OtherProcess
from attngen.inspect.trial import Trial
from attngen.plan import ARCHES
from attngen.reference.compare_gradients import gradient_truth
from attngen.reference.problems import Shape
from attngen.schedules import choose
from tests.harness import shipped


def half(number: int) -> int:
    if number % 2:
        raise ValueError(number)
    return number // 2 if number else os._exit(3)


def test_another_process_computes_results_and_says_which_it_has_not() -> None:
    other = OtherProcess(half)
    try:
        assert [other.call(n) for n in (6, 7, 8)] == [3, None, 4]
        assert other.call(0) is None  # it ends
        assert other.call(6) is None
    finally:
        other.end()


def test_a_process_ends_whatever_it_does() -> None:
    import threading
    import time

    other = OtherProcess(time.sleep)
    caller = threading.Thread(target=other.call, args=(1000,), daemon=True)
    caller.start()
    other.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(other._id, os.WNOHANG)


@pytest.mark.parametrize("name", ["gpt2", "alibi", "sigmoid_attention", "gpt_oss_sinks"])
def test_bounds_of_few_draws_are_no_larger(name: str) -> None:
    """A result that these allow needs no others."""
    known = Known(shipped(name), Trial(Shape(1, 2, 1, 33, 40), {}))
    plan = choose(known.spec, ARCHES["sm_80"], "naive")
    few, every = known.truth(plan, FEW_DRAWS), known.truth(plan)
    assert few.allowed <= every.allowed
    assert few.allowed_lse <= every.allowed_lse
    np.testing.assert_array_equal(few.reference.output, every.reference.output)
    of = (known.spec, known.sample, known.loss)
    least, all_of_them = gradient_truth(*of, most_draws=FEW_DRAWS), gradient_truth(*of)
    assert all(least.allowed[n] <= all_of_them.allowed[n] for n in "qkv")
