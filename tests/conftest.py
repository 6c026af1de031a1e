"""Fixtures, and the selection of tests: those of the tier (tests/tiers.py); tests marked gpu only with a GPU, tests marked
browser only with Chromium. If ATTNGEN_NEEDS_BROWSER is set, a missing Chromium is an error."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import tiers
from tests.browser import find_browser

# Matrices of tests are small: their products take one thread less time than several. Read when numpy and torch are loaded.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

ROOT = tiers.ROOT
_seconds: dict[str, float] = {}  # durations of the tests that ran, by their names


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(tiers.chosen(config))
    if os.environ.get("ATTNGEN_NEEDS_BROWSER") and find_browser() is None:
        raise pytest.UsageError("no Chromium, and ATTNGEN_NEEDS_BROWSER is set; apt-get install chromium")


def pytest_report_header(config: pytest.Config) -> str | None:
    return tiers.header(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from attngen.device.select import has_gpu

    absent = set() if has_gpu() else {"gpu"}
    if find_browser() is None:
        absent.add("browser")
    tier = tiers.chosen(config)
    tiers.take_turns(items)
    kept, left_out = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}  # keywords also have the names of directories
        (kept if tiers.is_in(item, tier) and not absent & marks else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when in ("setup", "call"):
        _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--measure") and "PYTEST_XDIST_WORKER" not in os.environ:
        tiers.write_slow(_seconds)


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process: the garbage collector, which took 5% of the time, skips them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium."""
    from playwright.sync_api import sync_playwright

    from tests.browser import launch_options

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**launch_options())
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def runtime() -> dict[str, bytes]:
    """The emulated device's own code, compiled: entries of the kernel cache, which tests of other workers may empty."""
    from attngen.cache.disk_cache import cache_directory
    from attngen.device.emulated import EmulatedDevice
    from tests.harness import emitted, shipped

    EmulatedDevice().compile(emitted(shipped("gpt2"), "naive"))
    kept = {}
    for path in cache_directory("emulated").glob("runtime-*"):
        with suppress(FileNotFoundError):  # another compiler's, not used for long
            kept[path.name] = path.read_bytes()
    return kept


@pytest.fixture
def compiled_runtime(runtime: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel cache of the test's own, which holds the emulated device's own code alone: it is not compiled again."""
    place = tmp_path / "cache" / "emulated"
    place.mkdir(parents=True, mode=0o700)
    for name, data in runtime.items():
        (place / name).write_bytes(data)
        (place / name).chmod(0o600)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(place.parent))
    return place.parent


@pytest.fixture(scope="session", autouse=True)
def _kernels_of_tests(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of compiled kernels for all workers, separate from the user's, kept between runs in pytest's cache.

    `pytest --cache-clear` empties it. An entry is named by a digest of everything that it is compiled from, so it is never out
    of date. Without pytest's cache (`-p no:cacheprovider`), kernels are deleted after the run.
    """
    base = tmp_path_factory.getbasetemp()
    of_session = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    if "ATTNGEN_TEST_CACHE" in os.environ:
        root = Path(os.environ["ATTNGEN_TEST_CACHE"])
    elif (kept := getattr(pytestconfig, "cache", None)) is not None:
        root = kept.mkdir("attngen-kernels")
        root.chmod(0o700)
    else:
        root = of_session / "attngen-cache"
    os.environ["ATTNGEN_CACHE_DIR"] = str(root)
    _keep_results_of_nvrtc(of_session / "nvrtc")


def _keep_results_of_nvrtc(directory: Path) -> None:
    """Several tests read the spills, the lines and the machine code of one kernel: a session compiles it once."""
    from attngen.cache.disk_cache import digest
    from attngen.device.cuda import compiler
    from attngen.emit.program import Program

    compile_once = compiler._compile
    directory.mkdir(exist_ok=True)

    def kept(source: Program, targets: tuple[str, ...], *options: str) -> tuple[list[bytes], str]:
        file = directory / digest(source.text, source.name, *targets, *options)
        with suppress(FileNotFoundError):
            found: tuple[list[bytes], str] = pickle.loads(file.read_bytes())
            return found
        found = compile_once(source, targets, *options)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(found))
        partial.replace(file)  # whole or absent, for other workers
        return found

    compiler._compile = kept
