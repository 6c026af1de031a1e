"""The three rungs side by side on the GPU, beside torch's own kernels.

    python benchmarks/rungs.py [--write docs/performance.md]

Median milliseconds of a call by CUDA events, L2 flushed before each, rounds in random order; TFLOP/s count the pairs that the
mask keeps (4 * D FLOP a pair).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median

import torch
from markers import write_between
from torch.nn.attention import SDPBackend, sdpa_kernel

import attngen


def milliseconds(function, flush: torch.Tensor) -> float:
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(candidates: dict, rounds: int) -> dict[str, float]:
    """Median of `rounds` timings of every candidate, all in each round, in random order."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for function in candidates.values():
        function()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in random.sample(sorted(candidates), len(candidates)):
            times[name].append(milliseconds(candidates[name], flush))
    return {name: median(values) for name, values in times.items()}


def case(dtype: str, causal: bool, batch: int, heads: int, length: int, head_dim: int, rounds: int) -> dict:
    element = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=element) for _ in range(3))
    spec = attngen.define(dtype=dtype, head_dim=head_dim, mask="causal" if causal else None)
    candidates = {}
    for rung in ("naive", "tiled", "fused"):
        kernel = attngen.compile(spec, kernel=rung, device="cuda")
        candidates[rung] = lambda kernel=kernel: kernel(q, k, v)
    backends = {"torch math": SDPBackend.MATH, "torch efficient": SDPBackend.EFFICIENT_ATTENTION}
    if dtype != "fp32":
        backends |= {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():

        def torch_call(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        candidates[name] = torch_call
    found = measure(candidates, rounds)
    pairs = batch * heads * (length * (length + 1) / 2 if causal else length * length)
    return {
        "case": f"{dtype} {'causal' if causal else 'full'} B{batch} H{heads} D{head_dim} S{length}",
        "ms": found,
        "tflops": {name: 4 * head_dim * pairs / (ms * 1e9) for name, ms in found.items()},
    }


CASES = (
    ("fp32", False, 4, 8, 2048, 64),
    ("fp32", True, 4, 8, 2048, 64),
    ("fp32", False, 4, 8, 512, 64),
    ("bf16", False, 4, 8, 2048, 64),
    ("bf16", True, 4, 8, 2048, 64),
    ("bf16", False, 4, 8, 4096, 128),
    ("bf16", True, 4, 8, 4096, 128),
)


def table(results: list[dict]) -> str:
    names = ["naive", "tiled", "fused", "torch math", "torch efficient", "torch flash", "torch cuDNN"]
    lines = [f"| ms (TFLOP/s) | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for r in results:
        cells = [f"{r['ms'][n]:.3f} ({r['tflops'][n]:.0f})" if n in r["ms"] else "-" for n in names]
        lines.append(f"| {r['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    options = parser.parse_args()
    results = []
    for arguments in CASES:
        results.append(case(*arguments, options.rounds))
        print(json.dumps(results[-1]), flush=True)
    text = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds}\n\n{table(results)}"
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.write:
        write_between(options.write, "rungs", text)


if __name__ == "__main__":
    main()
