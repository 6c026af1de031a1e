"""Context parallelism of packed causal documents of uneven lengths: each GPU's time, by which rows a load balancer gives it.

`python benchmarks/context_parallel.py --only documents` runs it on all GPUs, with `--trial` on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cell import Row
from row_balance import BALANCERS, BLOCK, Assign, documents
from torch.distributed.tensor.experimental import _attention as parallel
from torch.nn.attention import flex_attention as theirs
from words import markdown

from attngen.bench.peers import first_line
from attngen.torch import TileBalancer, create_block_mask, flex_attention

BURST = 100.0  # milliseconds that calls back to back take, about
OPERATIONS = {"forward": 4, "training": 14}  # operations for a pair and a column
TRIAL_BLOCK = 4
Attend = Callable[..., torch.Tensor]
Tensors = list[torch.Tensor]


class Assigned(TileBalancer):
    """attngen's load balancer with the rows of another one."""

    def __init__(self, mask: Any, gpus: int, assign: Assign) -> None:
        super().__init__(mask, gpus)
        self._assigned = np.stack([assign(work, gpus) for work in self._work])


def attention(way: str, attend: Attend, tensors: Tensors, mask: Any) -> Tensors:
    """O, in training the gradients after it. Keys and values are all; gradients of them are this GPU's part of a sum."""
    q, k, v = (t.detach().requires_grad_(way == "training") for t in tensors[:3])
    output = attend(q, k, v, block_mask=mask, enable_gqa=True)
    return [output, *(torch.autograd.grad(output, (q, k, v), tensors[3]) if way == "training" else ())]


def own_milliseconds(call: Callable[[], object], count: int, on_gpu: bool) -> float:
    """The time of a call among `count` back to back, of this process alone."""
    if not on_gpu:
        call()
        return 1.0
    dist.barrier(device_ids=[torch.cuda.current_device()])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def medians(calls: dict[str, Callable[[], object]], rounds: int, on_gpu: bool) -> dict[str, list[float]]:
    """Milliseconds of each process, by name; the calls take turns."""
    once = {name: max(own_milliseconds(call, 1, on_gpu) for _ in range(2)) for name, call in calls.items()}
    counts = of_all_processes(once, on_gpu)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            times[name].append(own_milliseconds(calls[name], max(1, int(BURST / max(counts[name]))), on_gpu))
    return of_all_processes({name: median(found) for name, found in times.items()}, on_gpu)


def of_all_processes(own: dict[str, float], on_gpu: bool) -> dict[str, list[float]]:
    """The numbers of every process, by name."""
    given = torch.tensor(list(own.values()), device="cuda" if on_gpu else "cpu")
    found = [torch.empty_like(given) for _ in range(dist.get_world_size())]
    dist.all_gather(found, given)
    return dict(zip(own, torch.stack(found, 1).tolist(), strict=True))


def rates(mesh: Any, lengths: list[int], rounds: int, heads: tuple[int, int, int], on_gpu: bool) -> Iterator[Row]:
    """A row for each length, attention and balancer. `heads`: of queries, of keys, their size.

    `tflops` are those of a GPU by the slowest one's time, `slowest` is that time beside the mean, both by way; `tiles` are
    those of the GPU that has the most, beside the mean; `error` is that of O, beside attngen's with rows in order.
    """
    sides: dict[str, Attend] = {"attngen": flex_attention}
    if on_gpu:
        sides["FlexAttention"] = torch.compile(theirs.flex_attention, dynamic=False)
    for length in lengths:
        yield from _of_length(mesh, length, rounds, heads, sides)


def _of_length(mesh: Any, length: int, rounds: int, heads: tuple[int, int, int], sides: dict[str, Attend]) -> Iterator[Row]:
    q_heads, kv_heads, size = heads
    device, rank, on_gpu = mesh.device_type, mesh.get_local_rank(), mesh.device_type == "cuda"
    ids = torch.from_numpy(documents(length, 0)).to(device)
    mask = create_block_mask(partial(_in_documents, ids), None, None, length, length, device, BLOCK if on_gpu else TRIAL_BLOCK)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    whole = [torch.randn(1, n, length, size, device=device).to(dtype) for n in (q_heads, kv_heads, kv_heads, q_heads)]
    calls: dict[str, dict[str, Callable[[], object]]] = {way: {} for way in OPERATIONS}
    rows: dict[str, Row] = {}
    expected = None
    for name, assign in BALANCERS.items():
        balancer = Assigned(mask, mesh.size(), assign)
        own, every = balancer.rows(rank)[0], balancer._generate_indices()[0]
        tensors = [tensor[:, :, order] for tensor, order in zip(whole, (own, every, every, own), strict=True)]
        for side, attend in sides.items():
            key = f"{side}, {name}"
            rows[key] = {"case": f"S {length}", "rows": name, "attention": side, "tiles": balancer.slowest}
            try:
                found = attention("training", attend, tensors, balancer.part(rank))[0].detach()
            except Exception as error:  # whatever torch's kernel does not have
                rows[key]["refused"] = first_line(error)
                continue
            (output,) = parallel.context_parallel_unshard(mesh, [found], [2], balancer)
            expected = output if expected is None else expected
            rows[key]["error"] = float((output - expected).abs().max())
            for way in OPERATIONS:
                calls[way][key] = partial(attention, way, attend, tensors, balancer.part(rank))
    pairs = sum(n * (n + 1) / 2 for n in ids.bincount().tolist())
    times = {way: medians(calls[way], rounds, on_gpu) for way in OPERATIONS}
    for key in calls["forward"]:
        each = {way: np.array(times[way][key]) for way in OPERATIONS}
        work = pairs * q_heads * size / mesh.size()
        rows[key]["tflops"] = {way: float(OPERATIONS[way] * work / ms.max() / 1e9) for way, ms in each.items()}
        rows[key]["slowest"] = {way: float(ms.max() / ms.mean()) for way, ms in each.items()}
    yield from rows.values()


def _in_documents(ids: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (ids[q] == ids[k]) & (q >= k)


def rates_table(rows: list[Row]) -> str:
    figures = [f"{way}: {what}" for way in OPERATIONS for what in ("TFLOP/s", "slowest / mean")]
    titles = ("case", "rows", "attention", "tiles: slowest / mean", *figures, "largest difference of O")
    lines = [
        (
            row["case"], row["rows"], row["attention"], f"{row['tiles']:.3f}",
            *(text for way in OPERATIONS for text in (f"{row['tflops'][way]:.0f}", f"{row['slowest'][way]:.3f}")),
            f"{row['error']:.1e}",
        )
        for row in rows
        if "refused" not in row
    ]  # fmt: skip
    refused = sorted({f"{row['attention']}, {row['rows']}: {row['refused']}" for row in rows if "refused" in row})
    return markdown(titles, lines) + "".join(f"\n\nNot run: {one}." for one in refused)
