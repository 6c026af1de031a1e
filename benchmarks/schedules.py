"""The three schedules side by side on the GPU, beside torch's own kernels.

    python benchmarks/schedules.py [--write docs/tables]

Median milliseconds of a call by CUDA events, L2 flushed before each, rounds in random order; TFLOP/s count the pairs that the
mask keeps (4 * D FLOP a pair).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from markers import write_between
from torch.nn.attention import SDPBackend, sdpa_kernel

import attngen
from attngen.bench.measure import measure


def case(dtype: str, causal: bool, batch: int, heads: int, length: int, head_dim: int, rounds: int) -> dict:
    element = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=element) for _ in range(3))
    spec = attngen.define(dtype=dtype, head_dim=head_dim, mask="causal" if causal else None)
    candidates = {}
    for schedule in ("naive", "tiled", "fused"):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        candidates[schedule] = lambda kernel=kernel: kernel(q, k, v)
    backends = {"torch math": SDPBackend.MATH, "torch efficient": SDPBackend.EFFICIENT_ATTENTION}
    if dtype != "fp32":
        backends |= {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():

        def torch_call(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        candidates[name] = torch_call
    found = {name: timing.median for name, timing in measure(candidates, rounds).items()}
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
        write_between(options.write, "schedules", text)


if __name__ == "__main__":
    main()
