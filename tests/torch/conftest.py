"""Fixtures of the tests with torch."""

from __future__ import annotations

import pytest


@pytest.fixture
def fresh_dynamo() -> None:
    """torch.compile without the graphs and counters of earlier tests."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
