"""The parts of `benchmarks/backward.py`, a module each (see `parts.py`), and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from cell import Cell, Tensors

from attngen.bench.peers import flash_peers, torch_peers
from attngen.torch import Attention

Forward = Callable[[], torch.Tensor]
Backward = Callable[[], tuple[torch.Tensor, ...]]


def leaves(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same tensors, whose gradients are asked for."""
    return tuple(t.detach().requires_grad_() for t in tensors)


def backwards(forwards: Mapping[str, Forward], of: Sequence[torch.Tensor]) -> dict[str, Backward]:
    """The backward of each forward alone: the gradients of `of`, for one randn gradient of the output."""
    with torch.enable_grad():
        outputs = {name: forward() for name, forward in forwards.items()}
    gradient = torch.randn_like(next(iter(outputs.values())))
    return {name: partial(torch.autograd.grad, out, of, gradient, retain_graph=True) for name, out in outputs.items()}


def beside_torch(
    cell: Cell, tensors: Tensors, kernel: str | None, peers: Sequence[str], deterministic: bool = False, flash: bool = False
) -> dict[str, Backward]:
    """The backward of attngen's kernel (None: of what `auto` selects), and of those of torch's backends that take this; with
    `flash`, also of FlashAttention's packages. Whether attngen's must be `deterministic`: the peers need not."""
    q, k, v = leaves(tensors)
    ours = partial(Attention(cell.spec, mode=kernel or "auto", deterministic=deterministic), q, k, v)
    with torch.enable_grad():
        others = torch_peers(cell.spec, q, k, v, only=peers) | (flash_peers(cell.spec, q, k, v) if flash else {})
        return backwards({"attngen": ours, **others}, (q, k, v))


def operations(cell: Cell, tensors: Tensors) -> int:
    """Of a backward: Q K^T, dO V^T, P^T dO, dS^T Q and dS K, once for each pair that the mask keeps."""
    head_dim_v = cell.head_dim_v or cell.head_dim
    return cell.operations(tensors) * (3 * cell.head_dim + 2 * head_dim_v) // (cell.head_dim + head_dim_v)
