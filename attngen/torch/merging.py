"""`merge`: the attention of two sets of keys, from that of each."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError, ArgumentTypeError, check_one_device
from attngen.torch.layout import AXES, check_layout, check_tensors


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """The attention of the same queries to two sets of keys together, from the results for each: (O, lse).

        lse = log(exp(lse1) + exp(lse2)),   O = exp(lse1 - lse) O1 + exp(lse2 - lse) O2

    Each pair is what `attention(..., return_lse=True)` returns: O [batch, heads, q_len, head_dim_v], or with layout="bshd"
    [batch, q_len, heads, head_dim_v], and lse [batch, heads, q_len]; or the same without batch, as of packed sequences with
    layout="bshd". Uses: a prefix that several sequences share, or keys on several devices. Merging is associative. A sink must
    be part of only one of the sets.

    If a row's lse is -inf, it has no key in that set, and its O there is not used. Without a key in either set, O is 0 and lse
    is -inf. Computed in fp32 (fp64 if lse is fp64); O has the type of `o1`. Differentiable with respect to all four. Raises
    ArgumentError for shapes and devices that do not fit, ArgumentTypeError for what is no tensor of floats.
    """
    check_layout(layout)
    named = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    check_tensors(**named)
    if o1.dim() < 2:
        raise ArgumentError(f"`o1` is {list(o1.shape)}; expected {AXES[layout]}, or the last dimensions of it")
    rows = o1.transpose(-3, -2).shape[:-1] if layout == "bshd" and o1.dim() > 2 else o1.shape[:-1]
    for name, tensor in named.items():
        expected = o1.shape if name in ("o1", "o2") else rows
        if tensor.shape != expected:
            raise ArgumentError(f"`{name}` is {list(tensor.shape)}; expected {list(expected)}, as `o1` is {list(o1.shape)}")
        if not tensor.is_floating_point():
            raise ArgumentTypeError(f"`{name}` has elements of {str(tensor.dtype).removeprefix('torch.')}; expected floats")
        check_one_device(name, tensor.device, "o1", o1.device)
    lse1, lse2 = (lse if lse.dtype == torch.float64 else lse.float() for lse in (lse1, lse2))
    largest = torch.maximum(lse1, lse2).detach()  # any number gives the same result: it keeps exp from overflowing
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weight1, weight2 = torch.exp(lse1 - largest), torch.exp(lse2 - largest)
    total = weight1 + weight2
    has_none = total == 0
    total = torch.where(has_none, 1.0, total)
    lse = torch.where(has_none, -torch.inf, largest + torch.log(total))
    weighted1, weighted2 = (_weighted(o, weight / total, layout) for o, weight in ((o1, weight1), (o2, weight2)))
    return (weighted1 + weighted2).to(o1.dtype), lse


def _weighted(o: Tensor, weight: Tensor, layout: str) -> Tensor:
    """Rows times their weights; 0 where the weight is, whatever the row holds."""
    each = (weight.transpose(-2, -1) if layout == "bshd" and o.dim() > 2 else weight).unsqueeze(-1)
    return torch.where(each == 0, 0.0, o) * each
