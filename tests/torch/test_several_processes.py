"""Programs of several processes, by gloo on the CPU: context parallelism, and one that loses a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.conftest import ROOT  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
    ),
]


def output_of(*command: str) -> str:
    ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-3000:]
    return ran.stdout


def test_context_parallelism_of_four_processes_and_of_two() -> None:
    output_of("tests.torch.context_parallel", "gloo", "4")


def test_a_lost_process_ends_the_other_with_an_error() -> None:
    output_of("tests.torch.lost_process")
