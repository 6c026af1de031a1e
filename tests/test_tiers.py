"""The long tier draws from matrices of cases, and from nothing else."""

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


def test_half_of_a_matrix_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = items("test_a", tiers.cases(range(400), quick=[7]))
    assert chosen(matrix, "quick") == {"test_a[7]"}
    assert len(chosen(matrix, "all")) == 400
    draws = []
    for draw in ("1", "2", "1"):
        monkeypatch.setenv(tiers.DRAW, draw)
        draws.append(chosen(matrix, "long"))
    assert draws[0] == draws[2] != draws[1]
    for drawn in draws:
        assert "test_a[7]" not in drawn
        assert 140 < len(drawn) < 260
    assert len(draws[0] | draws[1]) > 250


def test_what_is_marked_by_itself_is_not_drawn() -> None:
    listed = items("test_b", [pytest.param(n, marks=pytest.mark.long) for n in range(50)])
    assert len(chosen(listed, "long")) == 50
    assert not chosen(listed, "quick")
