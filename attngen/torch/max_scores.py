"""The largest score of each row, by torch's own operations on some rows at once: kernels keep it in registers alone.

The operator has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.device.params import number_names
from attngen.spec.expr import Type
from attngen.torch.math import by_rows, call_of
from attngen.torch.operator import operator
from attngen.torch.runtime import parsed

PAIRS = 2**26  # scores in memory at once


def max_scores(
    q: Tensor, k: Tensor, spec: str, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Tensor:
    """The largest score of each row over the pairs that take part, [batch, q_heads, q_len] in fp32; -inf for a row without."""
    tensors = (q.detach(), k.detach(), spec, [t.detach() for t in inputs], list(ints), list(floats))
    return _operator(*tensors)


def _largest(q: Tensor, k: Tensor, text: str, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> Tensor:
    spec = parsed(text)
    names = (*number_names(spec, Type.INT), *number_names(spec, Type.FLOAT))
    params = dict(zip(names, (*ints, *floats), strict=True))
    batch, heads, q_len = q.shape[:3]
    group = heads // k.shape[1] if k.shape[1] else 1
    keys = k.float().repeat_interleave(group, 1)
    named = dict(zip((i.name for i in spec.inputs), inputs, strict=True))
    call = call_of(spec, q, k, named, params, torch.float32)
    found = torch.full((batch, heads, q_len), -math.inf, dtype=torch.float32, device=q.device)
    for rows, here in by_rows(call, q, k, PAIRS) if k.shape[2] else ():
        scores = (q[:, :, rows].float() @ keys.mT) * here.value(spec.scale, {})
        allowed = None if spec.mask is None else here.value(spec.mask, {})
        scores = torch.broadcast_to(here.value(spec.score, {"s": scores}, allowed), scores.shape)
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)
        found[:, :, rows] = scores.amax(-1)
    return found


def _shape(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


_operator = operator(
    "max_scores(Tensor q, Tensor k, str spec, Tensor[] inputs, SymInt[] ints, float[] floats) -> Tensor", _largest, _shape
)
