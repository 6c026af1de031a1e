"""What a call of flex_attention costs the host and the GPU, beside torch's compiled FlexAttention.

    python benchmarks/flex_host_cost.py

For a causal mask, ALiBi and documents: building the mask, the first call, later calls (median of 50, by the clock of the host
without waiting for the GPU), and forward plus backward on the GPU (median of 20, by events).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs

import attngen.torch as ours

LENGTH = 4096


def variants() -> dict[str, tuple[Any, Any]]:
    document = torch.arange(LENGTH, device="cuda") // 1000

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 16))

    return {
        "causal": (None, lambda b, h, q, k: q >= k),
        "ALiBi": (alibi, None),
        "documents": (None, lambda b, h, q, k: (q >= k) & (document[q] == document[k])),
    }


def seconds(function: Callable[[], Any]) -> float:
    """Until the GPU is done."""
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def on_host(function: Callable[[], Any]) -> float:
    """The median time until `function` returns, in microseconds."""
    found = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        found.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(found)


def on_gpu(function: Callable[[], Any]) -> float:
    """The median time of `function` on the GPU, in milliseconds."""
    found = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    q, k, v = (torch.randn(1, 16, LENGTH, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)
    print(torch.cuda.get_device_name())
    print(f"{'':10} {'':8} {'mask ms':>8} {'first s':>8} {'host us':>8} {'fwd ms':>8} {'fwd+bwd ms':>10}")
    compiled = torch.compile(theirs.flex_attention, fullgraph=True)
    for name, (score, mask) in variants().items():
        for who, attend, module in (("attngen", ours.flex_attention, ours), ("torch", compiled, theirs)):

            def make(module: Any = module, mask: Any = mask) -> Any:
                return None if mask is None else module.create_block_mask(mask, None, None, LENGTH, LENGTH, "cuda")

            seconds(make)
            building, blocks = 1e3 * seconds(make), make()

            def forward(attend: Any = attend, blocks: Any = blocks, score: Any = score) -> Any:
                return attend(q, k, v, score, blocks)

            def step(forward: Any = forward) -> None:
                torch.autograd.grad(forward(), (q, k, v), gradient)

            first = seconds(step)
            step()
            with torch.no_grad():
                forward()
                host, ahead = on_host(forward), on_gpu(forward)
            print(f"{name:10} {who:8} {building:8.2f} {first:8.2f} {host:8.0f} {ahead:8.3f} {on_gpu(step):10.3f}", flush=True)


if __name__ == "__main__":
    main()
