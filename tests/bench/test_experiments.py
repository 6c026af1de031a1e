"""The page of experiments is made from its data."""

from __future__ import annotations

import importlib
from datetime import date
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("benchmarks")


def test_the_page_is_current() -> None:
    """`python benchmarks/experiments_page.py` writes it."""
    assert (ROOT / "docs" / "experiments.md").read_text() == importlib.import_module("experiments_page").page()


def test_every_experiment_is_a_row_with_its_date_gpu_and_compiler() -> None:
    areas = importlib.import_module("experiments_page").areas()
    rows = [line for line in (ROOT / "docs" / "experiments.md").read_text().splitlines() if line.startswith("| 2")]
    assert len(rows) == sum(len(area["experiment"]) for area in areas)
    assert all(isinstance(one["date"], date) for area in areas for one in area["experiment"])
    assert all(area["gpu"] and area["compiler"] for area in areas)


def test_a_row_may_name_another_gpu_and_a_wrong_field_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = importlib.import_module("experiments_page")
    monkeypatch.setattr(script, "DATA", tmp_path)
    head = 'order = 1\ntitle = "T"\nabout = "A."\ngpu = "G"\ncompiler = "C"\n[[experiment]]\ndate = 2026-01-02\n'
    row = 'change = "x"\nexpected = "y"\nseen = "z"\nkept = "no"\n'
    (tmp_path / "one.toml").write_text(f'{head}{row}gpu = "other"\n')
    assert script.page().endswith("A. G, C.\n\n| date | change | expected | seen | kept |\n|---|---|---|---|---|\n"
                                  "| 2026-01-02, other | x | y | z | no |\n")  # fmt: skip
    (tmp_path / "one.toml").write_text(f'{head}{row}speed = "2"\n')
    with pytest.raises(ValueError, match="unknown or missing fields"):
        script.page()
