"""Rounds of timings and what is made of them, which needs no GPU."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

from attngen.bench.measure import WARM_UP, Rounds, calls_in, in_rounds


def test_ratios_are_those_within_rounds() -> None:
    """Clocks that fall by half after the first round change no ratio; the ratio of the medians would be 2 / 4."""
    rounds = Rounds(({"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 2.0}, {"a": 4.0, "b": 1.0}))
    assert rounds.medians() == {"a": 2.0, "b": 2.0}
    assert rounds.ratio("a", "b") == 1.0
    slowing = Rounds(({"a": 1.0, "b": 1.5}, {"a": 2.0, "b": 3.0}, {"a": 4.0, "b": 6.0}))
    assert slowing.ratio("a", "b") == 1.5
    assert slowing.ratio("b", "a") == pytest.approx(2 / 3)
    uneven = Rounds(({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 4.0}, {"a": 2.0, "b": 6.0}))
    assert uneven.ratio("a", "b") == 2.0
    assert uneven.medians() == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize(("one", "calls"), [(0.1, 120), (3.1, 4), (5.0, 2), (12.0, 1), (100.0, 1)])
def test_a_burst_is_as_many_calls_as_fit_and_at_least_one(one: float, calls: int) -> None:
    assert calls_in(12.0, one) == calls


def test_every_candidate_once_a_round_in_random_order_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def timed(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_rounds(["a", "b", "c"], 40, timed)
    assert len(found.each) == 40
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == WARM_UP + 40
    assert all(Counter(one) == Counter("abc") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert found.each[0] == {name: 3.0 * WARM_UP + 1 + rounds[WARM_UP].index(name) for name in "abc"}
