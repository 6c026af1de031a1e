"""Shared-memory bank conflicts of the default fused plans, counted by Nsight Compute.

    python benchmarks/bank_conflicts.py [--write docs/tables]

Runs one call of each plan at B1 S2048, causal, under ncu. The GPU's performance counters must be open to users. The table also
has all wavefronts of shared memory, of which the conflicts are a part.
"""

from __future__ import annotations

from collections.abc import Sequence

from ncu import Counts, run

METRICS = {
    "conflicts of loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "of ldmatrix": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    "of cp.async": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum",
    "of stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}
CASES = [(dtype, head_dim) for dtype in ("bf16", "fp32", "fp32 high") for head_dim in (64, 128)]


def calls() -> None:
    """What runs under ncu: the cases, in order."""
    import torch

    from attngen.torch import Attention

    for dtype, head_dim in CASES:
        element = torch.bfloat16 if dtype == "bf16" else torch.float32
        q, k, v = torch.randn(3, 1, 2048 // head_dim, 2048, head_dim, device="cuda").to(element).unbind(0)
        precision = "high" if dtype.endswith("high") else "highest"
        Attention(mask="causal", precision=precision, mode="fused")(q, k, v)
    torch.cuda.synchronize()


def table(found: Sequence[Counts]) -> str:
    lines = ["| plan | " + " | ".join(METRICS) + " |", "|---" * (len(METRICS) + 1) + "|"]
    for (dtype, head_dim), values in zip(CASES, found, strict=True):
        lines.append(f"| {dtype} D{head_dim} | " + " | ".join(values.get(m, "-") for m in METRICS.values()) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run(__file__, __doc__, calls, "fused", METRICS.values(), table)
