"""The backend for vLLM, and the stand-ins of other tests, against vLLM's own classes: pip install --no-deps 'vllm==0.33.*'."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
own = pytest.importorskip("vllm.v1.attention.backend")

from tests.torch import vllm_interfaces as stand_ins  # noqa: E402

CLASSES = ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl", "CommonAttentionMetadata")


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def methods(cls: Any) -> dict[str, Any]:
    return {name: getattr(cls, name) for name, found in vars(cls).items() if callable(found) or isinstance(found, staticmethod)}


@pytest.mark.parametrize("name", CLASSES)
def test_stand_ins_have_the_signatures_of_vllm(name: str) -> None:
    for method, ours in methods(getattr(stand_ins, name)).items():
        if method.startswith("__") and method != "__init__":
            continue
        theirs = getattr(getattr(own, name), method)
        assert parameters(ours) == parameters(theirs)[: len(parameters(ours))], method


def test_the_backend_is_one_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods of its classes are those of vLLM, with the same arguments; none is left abstract."""
    monkeypatch.delitem(sys.modules, "attngen.vllm.backend", raising=False)
    backend = import_module("attngen.vllm.backend")
    monkeypatch.delitem(sys.modules, "attngen.vllm.backend")
    for ours in (backend.AttngenBackend, backend.AttngenMetadataBuilder, backend.AttngenImpl):
        assert not ours.__abstractmethods__
        base = next(cls for cls in ours.__mro__[1:] if cls.__module__ == own.__name__)
        for method, found in methods(ours).items():
            if not method.startswith("_"):
                assert parameters(found)[: len(parameters(getattr(base, method)))] == parameters(getattr(base, method)), method
