"""Puzzles on a GPU: each solution is right with its large launch, too."""

from __future__ import annotations

import pytest

from attngen.puzzles.folder import Folder, folders
from attngen.puzzles.report import verdict_text
from attngen.puzzles.verdict import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_a_solution_runs_on_the_gpu(folder: Folder) -> None:
    verdict = check(folder, folder.solution, f"{folder.name}.cu")
    shown = verdict_text(verdict, folder.solution)
    print(shown.strip().splitlines()[-1])
    assert verdict.medal == "gold", shown
    assert verdict.gpu is not None
    assert verdict.gpu.microseconds > 0
    assert f"right on {verdict.gpu.gpu}: {verdict.gpu.what}" in shown


def test_a_wrong_number_on_the_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be if the emulated device had missed something: here nothing is close enough."""
    folder = folders()[6]
    monkeypatch.setattr("attngen.puzzles.verdict._is_right", lambda got, expected, tolerance: got.reshape(-1) < -1)
    monkeypatch.setattr("attngen.puzzles.verdict._value_problem", lambda *_: None)
    found = check(folder, folder.solution, "mine.cu").problem
    assert found is not None
    assert found.kind == "gpu"
    assert found.message.startswith("p[0, 0] is ")
