"""Context parallelism that loses a process: `python -m tests.torch.lost_process`.

Of two processes, one stops in the middle of a training step: it hangs, and in a second run it ends. Exits with an error if the
other does not raise one that says so, or if attngen stays torch's attention.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from attngen.torch import activated, registry
from tests.torch.context_parallel import HEADS, compile_first, results
from tests.torch.processes import join_group, together

LOST = 1  # the process that stops
FORWARDS = 2  # forwards of a step by each of two processes
WAITING = 5  # seconds that a process waits for one that hangs: its group's timeout
SAYS = {"hangs": rf"[Tt]imed out.*{WAITING}000 ?ms", "ends": "Connection (closed|reset) by peer|[Bb]roken pipe"}


def step(rank: int, group: Any, stop: Callable[[], object]) -> None:
    """Two training steps, in the second of which process LOST stops before its second forward: keys are on their way."""
    calls = []
    runtime = registry.runtime

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        if rank == LOST and len(calls) == 2 * FORWARDS:
            stop()
        return runtime(*arguments)

    registry.runtime = counted
    tensors = [torch.randn(2, HEADS, 8, 8) for _ in range(4)]
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    try:
        with activated(emulated=True), context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
            for _ in range(2):
                results(*tensors, True)
    finally:
        registry.runtime = runtime


def work(rank: int, processes: int, store: str, way: str) -> None:
    join_group(rank, processes, store)
    group, stop = dist.group.WORLD, partial(os._exit, 0)
    if way == "hangs":  # until the other has raised and reaches this barrier, which is of the group that waits longer
        group, stop = dist.new_group(timeout=timedelta(seconds=WAITING)), dist.barrier
    own = functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError) as raised:
        step(rank, group, stop)
    assert functional.scaled_dot_product_attention is own
    print(f"process {rank}, if process {LOST} {way}: {raised.type.__name__}: {raised.value}", flush=True)
    if rank != LOST:
        assert re.search(SAYS[way], str(raised.value))
        if way == "hangs":
            dist.barrier()


if __name__ == "__main__":
    compile_first()
    for way in SAYS:
        together(work, 2, way)
