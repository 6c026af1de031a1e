"""torch's context parallelism over several GPUs, its attention computed by attngen and by cuDNN: forward, and with gradients.

    python benchmarks/context_parallel.py [--gpus N] [--lengths 32768,131072] [--rounds 5] [--write docs/tables]
    python benchmarks/context_parallel.py --trial       two processes of the CPU, short rows: whether it runs
    python benchmarks/context_parallel.py --only balance [--write docs/tables]      no GPU: tiles of each GPU
    python benchmarks/context_parallel.py --only documents [--write docs/tables]

One process for each GPU has a part of every sequence, for causal attention the first part and the last one of twice as many, so
that all have equal work. Keys travel around a ring (`alltoall`), or are gathered (`allgather`): torch's two plans. 32 query
heads share 8 key heads of 128, bf16, one sequence, randn. A rate counts the pairs that the mask keeps, 4 operations a pair and
column for the forward and 10 for the gradients, and is that of one GPU: the time is the slowest process's. `share` is this rate
beside that of one GPU which computes the whole sequence alone by attngen, in the same run. `sent` is what a GPU sends in a
step: keys and values, then in a step with gradients once more and their gradients. Errors are those of O and the gradients
against one GPU, beside the largest element; `same bits` says whether two steps under `torch.use_deterministic_algorithms(True)`
gave the same bits.

`--only balance` divides rows among 2, 4 and 8 GPUs by each load balancer, and counts the tiles of 128 rows by 128 keys that
the mask does not leave empty: those of the GPU that has the most, beside the mean. Documents have lengths from 64 rows to a
quarter of the sequence, uniform in their logarithm; the largest of 5 draws counts. `--only documents` measures one draw of
causal documents: `flex_attention` of a GPU's rows beside all keys, by attngen and by torch, without the exchange of keys.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cell import CUDNN, Row
from document_rows import rates, rates_table
from markers import write_between
from row_balance import balance_table, balances
from torch.distributed.tensor.experimental import _attention as parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from words import markdown

from attngen.bench.peers import first_line
from attngen.bench.sweep import where
from attngen.torch import activated

HEADS, KV_HEADS, SIZE = 32, 8, 128
PLANS = {"ring": "alltoall", "gathered": "allgather"}
WAYS = ("forward", "training")
OPERATIONS = {"forward": 4, "training": 14}  # for a pair and a column
SENT = {"forward": 1, "training": 3}  # times K and V: the backward sends them again, and their gradients
BURST = 100.0  # milliseconds of calls back to back, about
TRIAL_HEADS, TRIAL_SIZE, TRIAL_LENGTH = 4, 8, 16


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence divided among all GPUs."""

    plan: str
    is_causal: bool
    length: int
    on_gpu: bool

    @property
    def title(self) -> str:
        return f"{self.plan}, {'causal' if self.is_causal else 'full'}, S {self.length}"

    def randn(self) -> list[torch.Tensor]:
        """Q, K, V and dO of the whole sequence, the same in every process."""
        torch.manual_seed(0)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS) if self.on_gpu else (TRIAL_HEADS, TRIAL_HEADS, TRIAL_HEADS, TRIAL_HEADS)
        size, device, dtype = (SIZE, "cuda", torch.bfloat16) if self.on_gpu else (TRIAL_SIZE, "cpu", torch.float32)
        return [torch.randn(1, h, self.length, size, device=device, dtype=dtype) for h in heads]

    def operations(self, way: str, tensors: list[torch.Tensor]) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.is_causal else self.length**2
        return OPERATIONS[way] * pairs * tensors[0].shape[1] * tensors[0].shape[3]


def attention(case: Case, way: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """O, in training the gradients after it."""
    if way == "forward":
        with torch.no_grad():
            return [functional.scaled_dot_product_attention(*tensors[:3], is_causal=case.is_causal, enable_gqa=True)]
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    output = functional.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])]


def sides(case: Case) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """What computes the attention, as a context; on the CPU attngen alone."""
    if not case.on_gpu:
        return {"attngen": lambda: activated(emulated=True)}
    return {"attngen": activated, CUDNN: lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}


def milliseconds(call: Callable[[], object], count: int, on_gpu: bool) -> float:
    """The time of a call among `count` back to back, the same in all processes: the slowest one's."""
    if not on_gpu:
        call()
        return 1.0
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    slowest = torch.tensor(begin.elapsed_time(end) / count, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


@contextmanager
def divided(make: Callable[[], AbstractContextManager[object]], mesh: Any) -> Iterator[None]:
    """torch's plan around calls of its attention, which `make` replaces or selects, outside of the plan."""
    rows = torch.zeros(2 * mesh.size(), device=mesh.device_type)  # the plan divides something at least
    with make(), parallel.context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0]):
        yield


def medians(
    case: Case,
    way: str,
    tensors: list[torch.Tensor],
    within: dict[str, Callable[[], AbstractContextManager[object]]],
    rounds: int,
) -> dict[str, float]:
    """Milliseconds of a call by side, which take turns, each in its context."""

    def time(name: str, count: int) -> float:
        with within[name]():
            return milliseconds(lambda: attention(case, way, tensors), count, case.on_gpu)

    once = {name: max(time(name, 1) for _ in range(2)) for name in within}
    times: dict[str, list[float]] = {name: [] for name in within}
    for number in range(rounds):
        for name in list(within)[:: 1 if number % 2 else -1]:
            times[name].append(time(name, max(1, int(BURST / once[name]))))
    return {name: median(found) for name, found in times.items()}


def parts_of(case: Case, mesh: Any) -> list[torch.Tensor]:
    """This process's rows."""
    parts = case.randn()
    with parallel.context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
        return parts


def row(case: Case, mesh: Any, rounds: int) -> Row:
    """Rates of one GPU among all, and of one alone."""
    parallel.set_rotate_method(PLANS[case.plan])
    parallel._cp_options.enable_load_balance = case.is_causal
    whole, parts = case.randn(), parts_of(case, mesh)
    found: Row = {"case": case.title, "tflops": {}, "alone": {}, "refused": {}}
    for way in WAYS:
        within = {}
        for name, make in sides(case).items():
            try:
                with divided(make, mesh):
                    attention(case, way, parts)
            except Exception as error:  # whatever torch's plan does not have for this backend
                found["refused"][f"{name}, {way}"] = first_line(error)
            else:
                within[name] = partial(divided, make, mesh)
        operations = case.operations(way, whole)
        times = medians(case, way, parts, within, rounds)
        found["tflops"][way] = {name: operations / mesh.size() / ms / 1e9 for name, ms in times.items()}
        found["alone"][way] = alone(replace(case, plan=""), way, rounds)
    with divided(sides(case)["attngen"], mesh), in_order():
        results, again = (attention(case, "training", parts) for _ in range(2))
        found["same bits"] = all(map(torch.equal, results, again))
        results = parallel.context_parallel_unshard(mesh, results, [2] * 4)
    with sides(case)["attngen"]():
        expected = attention(case, "training", whole)
    found["errors"] = {
        name: (float((one - other).abs().max()), float(one.abs().max()))
        for name, one, other in zip(("O", "dQ", "dK", "dV"), expected, results, strict=True)
    }
    sent = sum(t.nbytes for t in whole[1:3]) * (mesh.size() - 1) / mesh.size()
    return found | {"sent": {way: sent * times for way, times in SENT.items()}}


@contextmanager
def in_order() -> Iterator[None]:
    """Gradients whose bits are the same in every run."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@cache
def alone(case: Case, way: str, rounds: int) -> float:
    """TFLOP/s of one GPU that computes the whole sequence by attngen; each GPU does so at the same time."""
    tensors = case.randn()
    (ms,) = medians(case, way, tensors, {"alone": sides(case)["attngen"]}, rounds).values()
    return case.operations(way, tensors) / ms / 1e9


def cases(lengths: list[int], on_gpu: bool) -> Iterator[Case]:
    for length in lengths:
        for plan in PLANS:
            yield Case(plan, True, length, on_gpu)
    yield Case("ring", False, lengths[0], on_gpu)


def work(rank: int, options: argparse.Namespace, store: str) -> None:
    """One process."""
    on_gpu = not options.trial
    device = torch.device("cuda", rank) if on_gpu else None
    if device:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=options.gpus, device_id=device
    )
    mesh = dist.device_mesh.init_device_mesh("cuda" if on_gpu else "cpu", (options.gpus,))
    rows: list[Any] = []
    for found in found_rows(mesh, options, on_gpu):
        rows.append(found)
        if rank == 0:
            print(json.dumps(found), flush=True)
    if rank == 0:
        text = rates_table(rows) if options.only else table(rows, options.gpus)
        print(text)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
        if options.write:
            place = f"{options.gpus} times {where()}, {options.rounds} rounds"
            write_between(options.write, "context_parallel", f"{place}\n\n{text}", options.only)
    dist.barrier(device_ids=[rank] if on_gpu else None)
    dist.destroy_process_group()


def found_rows(mesh: Any, options: argparse.Namespace, on_gpu: bool) -> Iterator[Row]:
    if options.only:
        heads = (HEADS, KV_HEADS, SIZE) if on_gpu else (TRIAL_HEADS, TRIAL_HEADS, TRIAL_SIZE)
        yield from rates(mesh, options.lengths, options.rounds, heads, on_gpu)
    else:
        yield from (row(case, mesh, options.rounds) for case in cases(options.lengths, on_gpu))


def table(rows: list[Row], gpus: int) -> str:
    titles = ("case", "way", "attngen", "cuDNN", "attngen / cuDNN", f"share of one GPU, of {gpus}", "MB sent")
    lines = []
    for found in rows:
        for way in WAYS:
            rates = found["tflops"][way]
            ours, theirs = rates["attngen"], rates.get(CUDNN)
            lines.append(
                (
                    found["case"], way, f"{ours:.0f}", f"{theirs:.0f}" if theirs else "-",
                    f"{ours / theirs:.3f}" if theirs else "-", f"{ours / found['alone'][way]:.3f}",
                    f"{found['sent'][way] / 1e6:.0f}",
                )
            )  # fmt: skip
    errors = [
        (
            found["case"],
            *(f"{error:.1e} of {largest:.2g}" for error, largest in found["errors"].values()),
            "yes" if found["same bits"] else "no",
        )
        for found in rows
    ]
    refused = {f"{name}: {why}" for found in rows for name, why in found["refused"].items()}
    said = "".join(f"\n\nNot run: {one}." for one in sorted(refused))
    rates_table = markdown(titles, lines)
    error_table = markdown(("case", "O", "dQ", "dK", "dV", "same bits"), errors)
    return f"{rates_table}\n\nLargest differences to one GPU:\n\n{error_table}{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="processes, one for each GPU  [default: all GPUs]")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], help="rows of the whole sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--trial", action="store_true", help="two processes of the CPU by gloo, short rows; no figure means anything"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    parser.add_argument(
        "--only",
        choices=["balance", "documents"],
        help="balance: no rates, but how even the GPUs' work is, without a GPU; documents: rates of packed documents",
    )
    options = parser.parse_args()
    if options.only == "balance":
        text = balance_table(list(balances(options.lengths or [32768, 131072, 524288])))
        print(text)
        if options.write:
            write_between(options.write, "context_parallel", text, "balance")
        return
    options.gpus = options.gpus or (2 if options.trial else torch.cuda.device_count())
    options.lengths = options.lengths or ([TRIAL_LENGTH] if options.trial else [32768, 131072, 262144])
    if options.gpus < 2:
        parser.error(f"context parallelism needs two GPUs at least, and there are {options.gpus}; --trial uses the CPU")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(work, (options, str(Path(directory, "store"))), nprocs=options.gpus)


if __name__ == "__main__":
    main()
