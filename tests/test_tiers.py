"""Each test is in a tier, and in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers


def items(name: str, cases: list[Any]) -> list[Any]:
    """Tests as pytest collects them."""

    def marked(case: Any) -> Any:
        def iter_markers(name: str) -> Iterator[pytest.Mark]:
            return (mark for mark in (getattr(m, "mark", m) for m in case.marks) if mark.name == name)

        return SimpleNamespace(nodeid=f"{name}[{case.values[0]}]", iter_markers=iter_markers)

    return [marked(case) for case in cases]


def chosen(tests: list[Any], tier: str) -> set[str]:
    return {test.nodeid for test in tests if tiers.is_in(test, tier)}


def test_cases_of_a_matrix() -> None:
    matrix = items("test_a", tiers.cases(range(5), quick=[3]))
    assert chosen(matrix, "quick") == {"test_a[3]"}
    assert chosen(matrix, "long") == {f"test_a[{n}]" for n in (0, 1, 2, 4)}
    assert len(chosen(matrix, "all")) == 5
    by_two = tiers.cases([(dtype, size) for dtype in ("fp16", "fp32") for size in (1, 2)], quick=lambda _, size: size == 2)
    assert [not case.marks for case in by_two] == [False, True, False, True]


def test_each_case_of_a_matrix_that_takes_turns_is_in_one_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    first = set()
    for version in map(str, range(40)):
        monkeypatch.setattr(tiers, "version", lambda version=version: version)
        names = [{mark.name for mark in case.marks} for case in tiers.cases(range(11), quick=[4], one_of=3)]
        assert names[4] == set()
        assert all("long" in marks for n, marks in enumerate(names) if n != 4)
        in_long = {n for n, marks in enumerate(names) if marks == {"long"}}
        assert len(in_long) == 4  # a third of ten
        first |= in_long
    assert first == {*range(11)} - {4}  # each has had its turn
