"""Each test is in a tier, and in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiers


class Case:
    """A case of a test as pytest collects it."""

    def __init__(self, name: str, case: Any) -> None:
        self.nodeid, self.marks = f"{name}[{case.values[0]}]", [getattr(mark, "mark", mark) for mark in case.marks]

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def items(name: str, cases: list[Any]) -> list[Any]:
    return [Case(name, case) for case in cases]


def chosen(tests: list[Any], tier: str) -> set[str]:
    return {test.nodeid for test in tests if tiers.is_in(test, tier)}


def test_cases_of_a_matrix() -> None:
    matrix = items("test_a", tiers.cases(range(5), quick=[3]))
    assert chosen(matrix, "quick") == {"test_a[3]"}
    assert chosen(matrix, "long") == {f"test_a[{n}]" for n in (0, 1, 2, 4)}
    assert len(chosen(matrix, "all")) == 5
    by_two = tiers.cases([(dtype, size) for dtype in ("fp16", "fp32") for size in (1, 2)], quick=lambda _, size: size == 2)
    assert [not case.marks for case in by_two] == [False, True, False, True]


@pytest.mark.parametrize("one_of", [3, tiers.ONE_OF])
def test_each_long_case_has_its_turn(one_of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first: set[str] = set()
    for version in map(str, range(60)):
        monkeypatch.setattr(tiers, "version", lambda version=version: version)
        matrix = items("test_a", tiers.cases(range(11), quick=[4], one_of=one_of))
        alone = items("test_b", tiers.cases([0]))
        tiers.take_turns(matrix + alone)
        assert chosen(matrix, "quick") == {"test_a[4]"}
        assert len(chosen(matrix, "long")) == -(-10 // one_of)
        assert len(chosen(matrix, "long") | chosen(matrix, "turns") | chosen(matrix, "quick")) == 11
        assert chosen(alone, "long") == {"test_b[0]"}
        first |= chosen(matrix, "long")
    assert len(first) == 10


def test_each_long_test_of_a_file_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[str] = set()
    for version in map(str, range(40)):
        monkeypatch.setattr(tiers, "version", lambda version=version: version)
        tests = [items(f"file.py::test_{n}", tiers.cases(range(3), quick=[0])) for n in range(5)]
        always = items("file.py::test_always", tiers.cases(range(3), one_of=1))
        tiers.take_turns([item for test in (*tests, always) for item in test])
        assert len(chosen(always, "long")) == 3
        with_cases = [test for test in tests if chosen(test, "long")]
        assert len(with_cases) == 2, "a third of five"
        assert all(len(chosen(test, "long")) == 1 and len(chosen(test, "quick")) == 1 for test in with_cases)
        drawn |= {item for test in tests for item in chosen(test, "long")}
    assert len(drawn) == 10


def test_slow_tests_are_long_and_a_part_of_them_has_a_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiers, "SLOW", tmp_path / "slow.tsv")
    tiers.SLOW.write_text("1.2\ttests/device/file.py::test_a[0]\n3.0\ttests/device/file.py::test_a[gone]\n", encoding="utf-8")
    tiers.slow_tests.cache_clear()
    tiers.write_slow({f"tests/device/file.py::test_a[{n}]": n for n in range(4)})
    tiers.slow_tests.cache_clear()
    assert tiers.slow_tests() == {
        f"tests/device/file.py::test_a[{n}]": s for n, s in ((1, 1.0), (2, 2.0), (3, 3.0), ("gone", 3.0))
    }
    matrix = items("tests/device/file.py::test_a", tiers.cases(range(5), quick=lambda _: True))
    matrix[3].add_marker(pytest.mark.quick)
    tiers.take_turns(matrix)
    tiers.slow_tests.cache_clear()
    assert chosen(matrix, "quick") == {f"tests/device/file.py::test_a[{n}]" for n in (0, 3, 4)}
    assert len(chosen(matrix, "long")) == len(chosen(matrix, "turns")) == 1
