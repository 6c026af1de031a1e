"""The floating-point operations of the operators, which torch.utils.flop_counter.FlopCounterMode adds up. torch.compile reads
them if it has a budget for the memory of activations.

They are counted as those of torch's own attention: two for each multiplication of a product, for all pairs of a query and a
key, those that the mask excludes included, and the products of the backward with the scores that it computes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attngen.spec.attention import CU_SEQLENS, LONGEST, PAGES
from attngen.torch.backward import Backward, BackwardArguments
from attngen.torch.operator import Ints, Tensors
from attngen.torch.private import FakeTensor
from attngen.torch.runtime import parsed


def of_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Tensors = None,
    ints: Ints = None,
    *_: object,
    out_val: object,
    **__: object,
) -> int:
    """The operations of `attention`, by its arguments."""
    return 2 * _pairs(q, k, spec, inputs or (), ints or ()) * (q.shape[-1] + v.shape[-1])


def of_backward(*arguments: *BackwardArguments, out_val: object) -> int:
    """The operations of `attention_backward`, by its arguments."""
    call = Backward(*arguments)
    size, size_v = call.q.shape[-1], call.v.shape[-1]
    products = {"q": size, "k": size, "v": size_v}
    again = size if set(call.wanted) == {"v"} else size + size_v  # scores, and gradients of the weights
    sizes = again + sum(products.get(name, 0) for name in call.wanted)
    return 2 * _pairs(call.q, call.k, call.spec, call.inputs, call.ints) * sizes


def _pairs(q: Tensor, k: Tensor, spec: str, inputs: Sequence[Tensor], ints: Sequence[int]) -> int:
    """The number of pairs of a query and a key, of all heads."""
    kernel = parsed(spec).kernel
    if kernel.storage == "dense":
        return prod(q.shape[:3]) * k.shape[2]
    begins = dict(zip(kernel.beginnings, inputs, strict=False))
    longest = dict(zip(kernel.longest, ints, strict=False))
    rows = _lengths(begins[CU_SEQLENS[0]], longest[LONGEST[0]]) if kernel.is_packed else [q.shape[2]] * q.shape[0]
    ends = PAGES[1] if kernel.is_counted else CU_SEQLENS[1]
    keys = _lengths(begins[ends], longest[LONGEST[1]], kernel.is_counted)
    return q.shape[1] * sum(n * m for n, m in zip(rows, keys, strict=True))


def _lengths(tensor: Tensor, longest: int, are_lengths: bool = False) -> Sequence[int]:
    """The lengths that a tensor of lengths, or of beginnings, holds; the longest for all if it has no memory."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return [longest] * (tensor.shape[0] - (not are_lengths))
    return (tensor if are_lengths else tensor.diff()).tolist()


register_flop_formula(torch.ops.attngen.attention, get_raw=True)(of_forward)
register_flop_formula(torch.ops.attngen.attention_backward, get_raw=True)(of_backward)
