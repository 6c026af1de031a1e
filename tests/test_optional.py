"""Modules of attngen that require a package, in a process that does not find it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
try:
    {statement}
except ImportError as error:
    print(type(error).__name__, error)
"""
TORCH = "pip install 'attngen[torch]'"
TRANSFORMERS = "attngen.transformers requires {}: pip install 'attngen[transformers]'"


def said(missing: tuple[str, ...], statement: str) -> str:
    code = WITHOUT.format(missing=missing, statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("missing", "statement", "message"),
    [
        (("torch",), "import attngen.torch", f"attngen.torch requires torch: {TORCH}"),
        (("torch",), "from attngen.torch import attention", f"attngen.torch requires torch: {TORCH}"),
        (("torch",), "import attngen.transformers", TRANSFORMERS.format("torch")),
        (("diffusers",), "import attngen.diffusers", "attngen.diffusers requires diffusers: pip install 'attngen[diffusers]'"),
        (("torch", "vllm"), "import attngen.vllm.backend", f"attngen.vllm requires torch: {TORCH}"),
        (("jax",), "import attngen.jax", "attngen.jax requires jax: pip install 'attngen[jax]'"),
        (("vllm",), "import attngen.vllm; attngen.vllm.register()", "attngen.vllm requires vllm: pip install vllm"),
    ],
)
def test_a_missing_package_is_named_with_its_cure(missing: tuple[str, ...], statement: str, message: str) -> None:
    assert said(missing, statement) == f"ModuleNotFoundError {message}"


@pytest.mark.long
def test_transformers_alone_is_missing() -> None:
    pytest.importorskip("torch")
    assert (
        said(("transformers",), "import attngen.transformers") == f"ModuleNotFoundError {TRANSFORMERS.format('transformers')}"
    )


def test_an_import_that_fails_for_another_reason_is_not_called_missing() -> None:
    """Of a package that is there, and misses one of its own."""
    pytest.importorskip("torch")
    assert said(("typing_extensions",), "import attngen.torch") == "ModuleNotFoundError No module named 'typing_extensions'"
