"""Commands of `benchmarks/` as modules."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import_module` finds what a command of `benchmarks/` imports."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
