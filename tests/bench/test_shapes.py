"""`benchmarks/shapes.py`, from made-up figures."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("benchmarks")


def test_the_table_names_shapes_and_the_fastest_backend() -> None:
    shapes = importlib.import_module("shapes")
    rows = [
        {"case": "llama, training", "ms": {"attngen": 0.8, "cuDNN": 1.0, "flash": 2.0}, "peer": "cuDNN", "ratio": 1.25},
        {"case": "bert, forward", "ms": {"attngen": 0.1, "efficient": 0.08}, "peer": "efficient", "ratio": 0.8},
    ]
    text = shapes.table(rows)
    assert "| llama, training | B1 H32 over 8, 4096 x 4096, D128 causal | 800.0 | 1000.0 | cuDNN | 1.25 |" in text
    assert "| bert, forward | B32 H12, 512 x 512, D64, padding | 100.0 | 80.0 | efficient | 0.80 |" in text
    assert text.endswith("Geometric mean 1.000, least 0.800 (bert, forward).")
