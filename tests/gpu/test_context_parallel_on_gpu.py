"""torch's context parallelism with attngen's kernels on two GPUs, by NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_results_of_one() -> None:
    command = [sys.executable, "-m", "tests.torch.context_parallel", "nccl", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
