"""Fixtures and the choice of tests: those marked gpu are deselected where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from attngen.device.choose import has_gpu

    if has_gpu():
        return
    wants_gpu = [item for item in items if "gpu" in item.keywords]
    if wants_gpu:
        config.hook.pytest_deselected(items=wants_gpu)
        items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, worker_cache: None) -> None:
    """Tests keep their compiled kernels to themselves; see worker_cache."""


@pytest.fixture(scope="session")
def worker_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of compiled kernels for all workers of a run, empty at its start."""
    import os

    if "ATTNGEN_TEST_CACHE" in os.environ:
        root = Path(os.environ["ATTNGEN_TEST_CACHE"])
    else:
        base = tmp_path_factory.getbasetemp()
        root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "attngen-cache"
    os.environ["ATTNGEN_CACHE_DIR"] = str(root)
