"""The table of cells in which attngen is first: current, and with a reason for each cell in which it is not."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture
def page() -> ModuleType:
    return importlib.import_module("first_in_each_cell")


def test_the_table_is_current(page: ModuleType) -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    found = re.search(r"<!-- first_in_each_cell: begin .*?-->\n(.*?)\n<!-- first_in_each_cell: end -->", text, re.S)
    assert found is not None
    assert found[1] == page.text()


def test_each_cell_behind_has_its_reason_and_each_reason_its_cell(page: ModuleType) -> None:
    used = set()
    for table in page.TABLES:
        for cell in page.behind(table):
            found = page.reasons(table, cell)
            assert len(found) == 1, (table.marker, cell)
            used |= {(m, pattern) for m, pattern in page.WHY if m == table.marker and re.fullmatch(pattern, cell.name)}
    assert used == set(page.WHY)


def test_the_fastest_peer_of_a_row_counts(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        "NVIDIA H200", "",
        "| TFLOP/s | attngen | cuDNN | FlashAttention-4 | ratio |", "| --- | --- | --- | --- | --- |",
        "| one | 600 | 500 | 640 (4e-04) | 1.2 |", "| two | 600 | - | - | - |", "| three | 90.5 (2.1) | 181 | - | 0.5 |",
    ]  # fmt: skip
    monkeypatch.setattr(page, "read_between", lambda path, name: "\n".join(rows))

    def ratios(**more: Any) -> list[tuple[str, float, str]]:
        table = page.Table("any", "any", ("cuDNN", "FlashAttention-4"), **more)
        return [(cell.name, cell.ratio, cell.peer) for cell in page.cells(table)]

    assert ratios() == [("one", 600 / 640, "FlashAttention-4"), ("three", 0.5, "cuDNN")]
    assert ratios(is_time=True) == [("one", 500 / 600, "cuDNN"), ("three", 2.0, "cuDNN")]
    assert ratios(ours="cuDNN") == [("one", 500 / 640, "FlashAttention-4"), ("three", 1.0, "cuDNN")]
