"""Processes of one program that compute together: their start, their group, and an end that is certain."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 1200  # seconds until a program that hangs is ended: compilers of a loaded machine take long
WAITING = 300  # seconds that a process waits for another: rank 0 may compile what the others have


def together(work: Callable[..., None], processes: int, *arguments: Any, limit: float = LIMIT) -> None:
    """Calls work(rank, processes, store, *arguments) in each of so many processes. `store` is a file of their group.

    A process that runs for `limit` seconds prints where each of its threads is, and ends. If one ends with an error, the others
    are ended too; then this exits with a message.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        try:
            torch.multiprocessing.spawn(_limited, (limit, work, processes, store, *arguments), nprocs=processes)
        except torch.multiprocessing.ProcessExitedException as error:
            if time.monotonic() - begin < limit:
                raise
            sys.exit(f"{sys.argv}: not finished after {limit:.0f} s; see above where a process was ({error})")


def _limited(rank: int, limit: float, work: Callable[..., None], processes: int, store: str, *arguments: Any) -> None:
    faulthandler.dump_traceback_later(limit, exit=True)  # a thread of C: Python may wait in a collective or on a GPU
    work(rank, processes, store, *arguments)
    faulthandler.cancel_dump_traceback_later()


def join_group(rank: int, processes: int, store: str, backend: str = "gloo") -> None:
    """Makes the process group of all."""
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)  # before NCCL, which binds a communicator to a device
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=WAITING),
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )


@contextmanager
def group(rank: int, processes: int, store: str, backend: str = "gloo") -> Iterator[None]:
    """The process group of all, destroyed at the end; not after an error, as others may then wait for this process."""
    join_group(rank, processes, store, backend)
    yield
    dist.barrier(device_ids=[rank] if backend == "nccl" else None)
    dist.destroy_process_group()
