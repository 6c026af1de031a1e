"""`benchmarks/first_call.py` and `commands.py` from made-up figures."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")


def test_first_calls_by_schedule() -> None:
    first_call = importlib.import_module("first_call")
    found = {
        "cold, first": {"fused": [70.0, 60.0, 80.0], "hopper": [900.0, 100.0, 2100.0]},
        "warm, first": {"fused": [5.0], "hopper": [3000.0]},
    }
    text = first_call.table(found)
    assert "| cold, first | 70 | 900 |" in text
    assert text.endswith("Goal: a cold call, compile included, within 2000 ms. Measured: at most 900; in one process 2100.")


def test_each_figure_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first_call = importlib.import_module("first_call")
    versions = SimpleNamespace(name="now"), SimpleNamespace(name="before")
    monkeypatch.setattr(first_call, "installed", lambda before: nullcontext(versions))
    monkeypatch.setattr(first_call, "child", lambda version, cache, schedule: {"first": 20.0, "next": 10.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["first_call.py", "--rounds", "3"])
    first_call.main()
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(figures) == 3 * len(first_call.SCHEDULES) * len(versions) * 4
    assert figures[0] == {"version": "now", "case": "cold, first", "schedule": "fused", "ms": 20.0}


def test_commands_beside_another_version() -> None:
    commands = importlib.import_module("commands")
    versions = SimpleNamespace(name="now"), SimpleNamespace(name="before")
    text = commands.table({("build, warm", "now"): [0.3, 0.2, 0.4], ("build, warm", "before"): [0.6]}, versions)
    assert text.splitlines()[0] == "| command | now, s | before, s | now / before |"
    assert text.splitlines()[2] == "| build, warm | 0.30 | 0.60 | 0.50 |"
