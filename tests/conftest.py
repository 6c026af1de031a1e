"""Fixtures and the choice of tests: those of the tier (tests/tiers.py); those marked gpu if there is a GPU, those marked browser
if there is Chromium. With ATTNGEN_NEEDS_BROWSER set, a missing Chromium is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import tiers

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(tiers.chosen(config))


def pytest_report_header(config: pytest.Config) -> str | None:
    return tiers.header(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from attngen.device.choose import has_gpu
    from tests.browser import find_browser

    absent = set() if has_gpu() else {"gpu"}
    if find_browser() is None:
        if os.environ.get("ATTNGEN_NEEDS_BROWSER"):
            raise pytest.UsageError("no Chromium, and ATTNGEN_NEEDS_BROWSER is set; apt-get install chromium")
        absent.add("browser")
    tier = tiers.chosen(config)
    kept, left_out = [], []
    for item in items:
        (kept if tiers.is_in(item, tier) and not absent & set(item.keywords) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


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
