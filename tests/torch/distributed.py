"""Two processes that train one small GPT by gloo, on the CPU: `python -m tests.torch.distributed ddp|fsdp`.

Each process has half of a batch. Exits with an error if a gradient differs from that of one process with the whole batch.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attngen.torch import Attention
from tests.torch.gpt import Gpt
from tests.torch.processes import group, together

PROCESSES = 2


def model() -> Gpt:
    """A GPT whose attention has parameters of its own: ALiBi slopes that are learned."""
    torch.manual_seed(0)
    slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    score = lambda s, b, h, q, k: s + slopes[h] * (k - q)  # noqa: E731
    return Gpt(Attention(mask="causal", score=score, layout="bshd", mode="naive"), width=16, heads=2, layers=2)


def backward(trained: torch.nn.Module, tokens: torch.Tensor) -> None:
    logits = trained(tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()


def work(rank: int, processes: int, store: str, kind: str) -> None:
    with group(rank, processes, store):
        compare(rank, kind)


def compare(rank: int, kind: str) -> None:
    tokens = torch.randint(256, (2 * PROCESSES, 7), generator=torch.Generator().manual_seed(1))
    whole = model()
    backward(whole, tokens)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    own = model()
    part = tokens.chunk(PROCESSES)[rank]
    if kind == "ddp":
        backward(DistributedDataParallel(own), part)
        found = {name: parameter.grad for name, parameter in own.named_parameters()}
    else:
        # the blocks share one attention, so they cannot be groups of their own
        fully_shard(own, mesh=dist.device_mesh.init_device_mesh("cpu", (PROCESSES,)))
        backward(own, part)
        found = {name: parameter.grad.full_tensor() for name, parameter in own.named_parameters()}
    assert found.keys() == expected.keys()
    assert any("slopes" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


if __name__ == "__main__":
    together(work, PROCESSES, sys.argv[1])
