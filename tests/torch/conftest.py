"""Fixtures of the tests with torch."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers do not depend on which tests ran before: a failure can be repeated."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> None:
    """torch.compile without the graphs and counters of earlier tests."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attention by torch's operations of the very spec that a kernel would compute; the texts of the specs."""
    from attngen.torch import flex_operator
    from attngen.torch.math import by_torch

    texts: list[str] = []

    def computed(tensors: Any, key: Any, describe: Any, arguments: Any, *_: Any) -> Any:
        q, k, v, text, *lists = arguments
        texts.append(text)
        return by_torch(q, k, v, text, *lists)

    monkeypatch.setattr(flex_operator._front, "call", computed)
    return texts
