"""Fixtures and the choice of tests: those marked gpu are deselected where there is no GPU, those marked browser where there is
no Chromium; unless ATTNGEN_NEEDS_BROWSER says that there must be one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("attngen", deadline=None)  # no test is of time
settings.load_profile("attngen")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from attngen.device.choose import has_gpu
    from tests.browser import find_browser

    absent = set() if has_gpu() else {"gpu"}
    if find_browser() is None:
        if os.environ.get("ATTNGEN_NEEDS_BROWSER"):
            raise pytest.UsageError("no Chromium, and ATTNGEN_NEEDS_BROWSER is set; apt-get install chromium")
        absent.add("browser")
    left_out = [item for item in items if absent & set(item.keywords)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not absent & set(item.keywords)]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, worker_cache: None) -> None:
    """Tests keep their compiled kernels to themselves; see worker_cache."""


@pytest.fixture(scope="session")
def worker_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of compiled kernels for all workers of a run, empty at its start."""
    if "ATTNGEN_TEST_CACHE" in os.environ:
        root = Path(os.environ["ATTNGEN_TEST_CACHE"])
    else:
        base = tmp_path_factory.getbasetemp()
        root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "attngen-cache"
    os.environ["ATTNGEN_CACHE_DIR"] = str(root)
