"""The oracle on torch: float64 truth on the tensors' own device, and torch's own result at storage precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attngen.reference.definition import Problem, allowed_rows, attention_rows, block_rows
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import names_in

if TYPE_CHECKING:
    import torch


def torch_attention(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    params: Mapping[str, int | float] | None = None,
    compute: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """O [batch, q_heads, q_len, head_dim_v] and lse [batch, q_heads, q_len] computed in `compute` (float64 by default)."""
    import torch

    wanted = compute or torch.float64

    def decode(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.to(wanted)
        return tensor if tensor.dtype is torch.bool else tensor.long()

    numbers = {p.name: p.default for p in spec.params if p.default is not None} | dict(params or {})
    real = {name: decode(tensor) for name, tensor in (inputs or {}).items()}
    problem = Problem(spec, decode(q), decode(k), decode(v), real, numbers, torch)
    batch, q_heads, q_len, _ = q.shape
    output = torch.zeros((batch, q_heads, q_len, v.shape[3]), dtype=wanted, device=q.device)
    lse = torch.full((batch, q_heads, q_len), float("-inf"), dtype=wanted, device=q.device)
    step = block_rows(problem)
    for b in range(batch):
        for h in range(q_heads):
            for start in range(0, q_len, step):
                rows = slice(start, min(start + step, q_len))
                found, row_lse = attention_rows(problem, b, h, rows)
                output[b, h, rows] = found.to(wanted)
                if row_lse is not None:
                    lse[b, h, rows] = row_lse.to(wanted)
    return output, lse if spec.normalize == "softmax" else None


def allowed_pairs(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    params: Mapping[str, int | float] | None = None,
) -> int:
    """How many pairs of a query and a key the mask keeps, over all heads."""
    import torch

    batch, q_heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    if spec.mask is None:
        return int(batch * q_heads * q_len * kv_len)
    numbers = {p.name: p.default for p in spec.params if p.default is not None} | dict(params or {})
    long = {n: t if t.dtype is torch.bool or t.dtype.is_floating_point else t.long() for n, t in inputs.items()}
    problem = Problem(spec, q, k, k, long, numbers, torch)
    used = names_in(spec.mask)
    heads = range(q_heads if "h" in used else 1)
    batches = range(batch if "b" in used else 1)
    step = block_rows(problem)
    total = 0
    for b in batches:
        for h in heads:
            for start in range(0, q_len, step):
                rows = slice(start, min(start + step, q_len))
                found = allowed_rows(problem, b, h, rows)
                total += int(found.expand(rows.stop - rows.start, kv_len).sum())
    return total * int(batch // len(batches)) * int(q_heads // len(heads))


def to_torch(array: Any, device: str) -> torch.Tensor:
    """A storage array of numpy as a tensor with the same bits."""
    import numpy as np
    import torch

    from attngen.spec.dtypes import NUMPY_BFLOAT16

    array = np.ascontiguousarray(array)
    if array.dtype == NUMPY_BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)
