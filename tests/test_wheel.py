"""What pip installs, from a wheel of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


def test_the_first_command_finds_templates_and_parser(tmp_path: Path) -> None:
    """The wheel contains their entries of the cache: with an empty cache, nothing is compiled and kept."""
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    places = {"PYTHONPATH": str(tmp_path / "site"), "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "attngen", "build", "gpt2", "-o", "built"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **places}, check=True)
    assert list((tmp_path / "built").iterdir())
    command = [sys.executable, "-m", "attngen", "puzzle", "start", "mma_fragments"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **places}, check=True)
    assert "mma.sync" in (tmp_path / "13_mma_fragments.cu").read_text(), "with its primitives"
    assert not (tmp_path / "cache").exists()
