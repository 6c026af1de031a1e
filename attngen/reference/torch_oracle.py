"""The oracle on torch: float64 results on the device of the tensors, and results at storage precision."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from attngen.reference.definition import Problem, attention, attention_rows, blocks_of_rows, count_allowed
from attngen.reference.problems import Array
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
    given = {"q": q, "k": k, "v": v, **(inputs or {})}
    problem = _problem(spec, {name: _decoded(tensor, wanted) for name, tensor in given.items()}, params or {})
    output = torch.zeros((*q.shape[:3], v.shape[3]), dtype=wanted, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wanted, device=q.device)
    return attention(problem, output, lse)


def torch_gradients(
    spec: AttentionSpec,
    tensors: Mapping[str, torch.Tensor],
    params: Mapping[str, int | float],
    dout: torch.Tensor,
    wanted: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """The gradients `wanted` in float64 by autograd, for a loss whose gradient by O is `dout`. `tensors` are q, k, v and the
    inputs by name. The derivative of each block of rows is taken by itself: memory grows with the lengths alone."""
    import torch

    numbers = {p.name: p.default for p in spec.params if p.default is not None} | dict(params)
    given = {name: _decoded(tensor.detach(), torch.float64) for name, tensor in tensors.items()}
    given |= {n: torch.tensor(numbers[n], dtype=torch.float64, device=dout.device) for n in wanted if n in numbers}
    leaves = {name: given[name].clone().requires_grad_() for name in wanted}
    read = {name: leaves.get(name, tensor) for name, tensor in given.items()}
    problem = _problem(spec, {name: read[name] for name in tensors}, {**numbers, **{n: read[n] for n in read if n in numbers}})
    with torch.enable_grad():
        for b, h, rows in product(range(dout.shape[0]), range(dout.shape[1]), blocks_of_rows(problem)):
            output, _ = attention_rows(problem, b, h, rows)
            if output.requires_grad:
                output.backward(dout[b, h, rows].double())
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def _decoded(tensor: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """Floats in `precision`, integers as int64."""
    import torch

    if tensor.dtype.is_floating_point:
        return tensor.to(precision)
    return tensor if tensor.dtype is torch.bool else tensor.long()


def _problem(spec: AttentionSpec, tensors: Mapping[str, torch.Tensor], params: Mapping[str, Any]) -> Problem:
    import torch

    from attngen.spec.torch_namespace import TorchNamespace

    inputs = dict(tensors)
    q, k, v = (inputs.pop(name) for name in ("q", "k", "v"))
    numbers = {p.name: p.default for p in spec.params if p.default is not None} | dict(params)
    return Problem(spec, q, k, v, inputs, numbers, TorchNamespace(torch.float64, q.device))


def allowed_pairs(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    params: Mapping[str, int | float] | None = None,
) -> int:
    """The number of pairs of a query and a key that the mask allows, over all heads and batches."""
    used = names_in(spec.mask) if spec.mask is not None else ()
    batches, heads = (size if index in used else 1 for index, size in zip("bh", q.shape, strict=False))
    given = {"q": q, "k": k, "v": k, **{name: _decoded(tensor, tensor.dtype) for name, tensor in inputs.items()}}
    counted = count_allowed(_problem(spec, given, params or {}), batches, heads)
    return counted * int(q.shape[0] // batches) * int(q.shape[1] // heads)


def to_torch(array: Array, device: str) -> torch.Tensor:
    """A storage array of numpy as a tensor with the same bits."""
    import numpy as np
    import torch

    array = np.asarray(array, order="C")
    if array.dtype.names is None:
        return torch.from_numpy(array).to(device)
    bits = torch.from_numpy(array.view(f"i{array.itemsize}"))
    return bits.view(getattr(torch, array.dtype.names[0])).to(device)
