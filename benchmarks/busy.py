"""How busy the hopper kernel keeps an SM, counted by Nsight Compute: what limits it where it misses its marks.

    python benchmarks/busy.py [--write docs/performance.md]

One call of each case under ncu, whose counters the GPU's owner must have opened to users. A pipe's share is of the cycles in
which the SM runs the kernel; a share of the tensor cores near 100% is the end of what these allow.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from markers import write_between
from ncu import counted
from words import markdown

import attngen

METRICS = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponentials (XU)": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue slots": "sm__inst_issued.avg.pct_of_peak_sustained_active",
}
DOCUMENTS = {"mask": "causal and same_document(ids)", "inputs": {"ids": ("int32", ("batch", "kv_len"))}}
# title: length, head size, keywords of attngen.define
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "full S16384": (16384, 128, {}),
    "causal S16384": (16384, 128, {"mask": "causal"}),
    "causal S8192": (8192, 128, {"mask": "causal"}),
    "causal S1024": (1024, 128, {"mask": "causal"}),
    "window 1024, S8192": (8192, 128, {"mask": "causal and window(1024)"}),
    "documents of 1024, S8192": (8192, 128, DOCUMENTS),
    "D64 causal S1024": (1024, 64, {"mask": "causal"}),
    "D256 causal S1024": (1024, 256, {"mask": "causal"}),
}


def calls() -> None:
    """What runs under ncu: the cases, in order."""
    import torch

    for length, head_dim, described in CASES.values():
        batch = 16384 // length
        q, k, v = torch.randn(3, batch, 2048 // head_dim, length, head_dim, device="cuda").bfloat16().unbind(0)
        ids = torch.arange(length, dtype=torch.int32, device="cuda") // 1024
        inputs = {"ids": ids.expand(batch, length).contiguous()} if "inputs" in described else {}
        spec = attngen.define(name="attention", dtype="bf16", head_dim=head_dim, **described)
        attngen.compile(spec, kernel="hopper", device="cuda", captures=inputs)(q, k, v)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a Markdown file whose table between the markers is replaced")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        calls()
        return
    found = counted(__file__, "hopper", METRICS.values())
    lines = [(case, *(f"{float(n[m]):.0f}%" for m in METRICS.values())) for case, n in zip(CASES, found, strict=True)]
    text = markdown(("busy, bf16, D128 unless said", *METRICS), lines)
    print(text)
    if options.write:
        write_between(options.write, "busy", text)


if __name__ == "__main__":
    main()
