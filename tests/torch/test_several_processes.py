"""Programs of several processes, by gloo on the CPU: context parallelism, one that loses a process, a training that resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_a_training_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """FSDP2 and context parallelism: the first step is that of one process, and a second run, which begins after the
    checkpoint, has the bits of the first. The optimizer's state decides the last step."""

    def steps() -> dict[Any, tuple[float, float]]:
        launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/train_llama.py", "--trial")
        found = output_of(*launch, "--deterministic", "--train", "5", "--checkpoint", str(tmp_path), "--every", "3")
        rows = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
        return {row["step"]: (row["loss"], row["norm"]) for row in rows}

    first = steps()
    assert first[0] == pytest.approx(first.pop("the first, of one process"), rel=1e-5)
    assert first.keys() == set(range(5))
    assert steps() == {3: first[3], 4: first[4]}
