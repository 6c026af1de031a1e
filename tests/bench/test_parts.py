"""Benchmarks of several parts: which are run, and where their tables are written."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")


class Counting:
    """A part with `rounds` rows."""

    def rows(self, rounds: int) -> Iterator[dict[str, Any]]:
        yield from ({"case": i} for i in range(rounds))

    def table(self, rows: list[dict[str, Any]]) -> str:
        return f"{len(rows)} rows"


@pytest.mark.parametrize("script", ["hopper", "portable"])
def test_a_part_replaces_its_own_table_alone(script: str, tmp_path: Path) -> None:
    markers = importlib.import_module("markers")
    for found in (ROOT / "docs" / "tables").glob("*.md"):
        (tmp_path / found.name).write_text(found.read_text())
    page = tmp_path / f"{script}.md"
    for name in importlib.import_module(script).PARTS:
        before = page.read_text()
        markers.write_between(tmp_path, script, f"figures of {name}", name)
        after = page.read_text()
        start = after.index(f"<!-- {script} {name}: begin (python benchmarks/{script}.py --only {name} ")
        stop = after.index(f"<!-- {script} {name}: end -->")
        assert f"figures of {name}" in after[start:stop]
        assert before.startswith(after[:start])
        assert before.endswith(after[stop:])
    with pytest.raises(ValueError, match=f"{script} other"):
        markers.write_between(tmp_path, script, "", "other")


def test_parts_are_asked_for_by_name() -> None:
    parts, hopper = (importlib.import_module(name) for name in ("parts", "hopper"))
    assert parts.chosen(hopper.PARTS, "plain,errors") == ["plain", "errors"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"no part is called speed; there are plain, sustained"):
        parts.chosen(hopper.PARTS, "plain,speed")


def test_rows_are_printed_and_the_other_tables_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = importlib.import_module("parts")
    monkeypatch.setattr(parts, "where", lambda: "a GPU")
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("".join(f"<!-- some {n}: begin -->\nold {n}\n<!-- some {n}: end -->\n" for n in ("one", "two")))
    command = ["some.py", "--only", "two", "--rounds", "3", "--write", str(page), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", command)
    parts.run("some", None, {"one": Counting(), "two": Counting()}, rounds=9)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:3]]
    assert printed == [{"part": "two", "case": i} for i in range(3)]
    assert json.loads(figures.read_text()) == {"two": [{"case": i} for i in range(3)]}
    assert "old one" in page.read_text()
    assert "old two" not in page.read_text()
    assert "a GPU, 3 rounds\n\n3 rows\n" in page.read_text()
