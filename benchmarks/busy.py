"""Pipe utilization of the Hopper kernel by Nsight Compute: what limits the cases that miss their goals.

    python benchmarks/busy.py [--write docs/tables]

One call of each case under ncu, whose counters the GPU's owner must have opened to users. A pipe's share is of the cycles in
which the SM runs the kernel; a share of the tensor cores near 100% is the end of what these allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ncu import Counts, run
from portable_parts.variants import VARIANTS, captured
from words import markdown

import attngen

METRICS = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponentials (XU)": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue slots": "sm__inst_issued.avg.pct_of_peak_sustained_active",
}
# title: length, head size, the variant
CASES = {
    "full S16384": (16384, 128, "full"),
    "causal S16384": (16384, 128, "causal"),
    "causal S8192": (8192, 128, "causal"),
    "causal S1024": (1024, 128, "causal"),
    "window 1024, S8192": (8192, 128, "window 1024"),
    "causal documents of 1024, S8192": (8192, 128, "causal documents of 1024"),
    "D64 causal S1024": (1024, 64, "causal"),
    "D256 causal S1024": (1024, 256, "causal"),
}


def calls() -> None:
    """What runs under ncu: the cases, in order."""
    for length, head_dim, variant in CASES.values():
        keywords, reads = VARIANTS[variant]
        q, k, v = torch.randn(3, 16384 // length, 2048 // head_dim, length, head_dim, device="cuda").bfloat16().unbind(0)
        spec = attngen.define(name="attention", dtype="bf16", head_dim=head_dim, **keywords)
        attngen.compile(spec, kernel="hopper", device="cuda", captures=captured(reads))(q, k, v)
    torch.cuda.synchronize()


def table(found: Sequence[Counts]) -> str:
    lines = [(case, *(f"{float(n[m]):.0f}%" for m in METRICS.values())) for case, n in zip(CASES, found, strict=True)]
    return markdown(("busy, bf16, D128 unless said", *METRICS), lines)


if __name__ == "__main__":
    run(__file__, __doc__, calls, "hopper", METRICS.values(), table)
