"""The stand-in for libcuda.so.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package.libraries import COMPILERS, INCLUDE, WARNINGS, built

SOURCE = Path(__file__).parent / "emulated_driver.cpp"


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1 that runs kernels on the emulated device."""
    directory = tmp_path_factory.mktemp("driver")
    options = [*WARNINGS, "-O1", "-shared", "-fPIC", f"-I{INCLUDE}"]
    built([COMPILERS[0], *options, SOURCE, "-o", directory / "libcuda.so.1", "-ldl"])
    return directory
