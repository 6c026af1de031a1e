"""What a call costs the host: attngen's ways of calling, beside torch's, in one process.

    python benchmarks/host_cost.py [--write docs/performance_tables.md]

Microseconds a call, median of batches of calls that are queued without waiting; the problem (B1 H4 S64 D64 bf16) is so small
that the GPU is never behind.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from markers import write_between

import attngen
from attngen.torch import Attention, attention
from attngen.torch.description import standard_text
from attngen.torch.operator import attention_operator

CALLS = 200


def batch(function: Callable[[], object]) -> float:
    """Microseconds a call of CALLS calls, nothing waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / CALLS


def candidates() -> dict[str, Callable[[], object]]:
    q, k, v = torch.randn(3, 1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    slopes = torch.ones(4, device="cuda")
    layer = Attention(mask="causal and q - k < n", params={"n": ("int", 32)})
    alibi = Attention(mask="causal", score="alibi(slopes)", inputs={"slopes": ("fp32", ("heads",))})
    text = standard_text("auto", True, None, False, q.dtype, 64, 64, None)
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=64, mask="causal"), device="cuda")
    out = torch.empty_like(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "torch: q + k": lambda: q + k,
        "torch: empty_like(q)": lambda: torch.empty_like(q),
        "torch: scaled_dot_product_attention": lambda: sdpa(q, k, v, is_causal=True),
        "attngen: torch.ops.attngen.attention": lambda: attention_operator(q, k, v, text),
        "attngen: attngen.torch.attention": lambda: attention(q, k, v, is_causal=True),
        "attngen: Attention with a param": lambda: layer(q, k, v),
        "attngen: Attention with an input": lambda: alibi(q, k, v, slopes=slopes),
        "attngen: attngen.compile(spec)(q, k, v)": lambda: compiled(q, k, v),
        "attngen: attngen.compile(spec)(q, k, v, out=out)": lambda: compiled(q, k, v, out=out),
    }


def growing() -> float:
    """Microseconds of a call whose length was not seen before: it is checked anew."""
    k = torch.randn(1, 4, 4096, 64, device="cuda", dtype=torch.bfloat16)
    q = k[:, :, :1]
    attention(q, k, k)
    times = []
    for length in range(100, 400):
        keys = k[:, :, :length]
        start = time.perf_counter()
        attention(q, keys, keys)
        times.append(1e6 * (time.perf_counter() - start))
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    functions = candidates()
    for function in functions.values():
        batch(function)
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for _ in range(options.rounds):
            for name in random.sample(sorted(functions), len(functions)):
                times[name].append(batch(functions[name]))
    found = {name: median(values) for name, values in times.items()}
    found["attngen: attngen.torch.attention, a length not seen before"] = growing()
    lines = ["| call | us |", "|---|---|", *(f"| {name} | {value:.1f} |" for name, value in found.items())]
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds} batches of {CALLS} calls"
    text = f"{where}\n\n" + "\n".join(lines)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        write_between(options.write, "host_cost", text)


if __name__ == "__main__":
    main()
