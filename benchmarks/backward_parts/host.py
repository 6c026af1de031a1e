"""What a backward costs the host, beside torch's: a problem so small that the GPU is never behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
from cell import Row
from words import Mark, markdown, worst

from attngen.torch import Attention, attention
from backward_parts import Backward, backwards, leaves

CALLS, TORCH = 200, "torch: scaled_dot_product_attention"


def rows(rounds: int) -> Iterator[Row]:
    q, k, v = leaves([torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)])
    window = Attention(mask="causal and window(32)")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = backwards(
        {
            TORCH: lambda: sdpa(q, k, v, is_causal=True),
            "attngen: attngen.torch.attention": lambda: attention(q, k, v, is_causal=True),
            "attngen: Attention": lambda: window(q, k, v),
        },
        (q, k, v),
    )
    for call in calls.values():
        call()
    each = [{name: microseconds(call) for name, call in calls.items()} for _ in range(rounds)]
    for name in calls:
        ratio = median(one[name] / one[TORCH] for one in each)
        yield {"case": name, "us": median(one[name] for one in each), "ratio": ratio}


def microseconds(call: Backward) -> float:
    """Of a call, CALLS of them queued without waiting."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / CALLS


def table(rows: list[Row]) -> str:
    lines = ((r["case"], f"{r['us']:.1f}", f"{r['ratio']:.2f}") for r in rows)
    text = markdown(("autograd.grad by q, k and v", "us", "of torch's"), lines)
    return f"{text}\n\nGoal: no more than torch's own."


def marks(rows: list[Row]) -> list[Mark]:
    return [worst("the host's time, of torch's", rows, lambda r: r["ratio"], 1.0, at_most=True)]
