"""The largest score of each row, by torch's own operations on some rows at once: kernels keep it in registers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attngen.spec.attention import AttentionSpec
from attngen.torch.math import call_of

Tensor = Any
PAIRS = 2**26  # scores in memory at once


@torch.no_grad()  # type: ignore[untyped-decorator]
def max_scores_of(spec: AttentionSpec, q: Tensor, k: Tensor, inputs: Sequence[Tensor], params: Mapping[str, int]) -> Tensor:
    """The largest score of each row over the pairs that take part, [batch, q_heads, q_len] in fp32; -inf for a row without."""
    batch, heads, q_len = q.shape[:3]
    group = heads // k.shape[1] if k.shape[1] else 1
    keys = k.float().repeat_interleave(group, 1)
    named = dict(zip((i.name for i in spec.inputs), (t.detach() for t in inputs), strict=True))
    call = call_of(spec, q, k, named, params, torch.float32)
    at_once = max(1, PAIRS // max(1, batch * heads * k.shape[2]))
    found = torch.full((batch, heads, q_len), -math.inf, device=q.device)
    for start in range(0, q_len if k.shape[2] else 0, at_once):
        rows = slice(start, min(start + at_once, q_len))
        here = replace(call, names={**call.names, "q": call.names["q"][:, :, rows]})
        scores = (q[:, :, rows].float() @ keys.mT) * here.value(spec.scale, {})
        allowed = None if spec.mask is None else here.value(spec.mask, {})
        scores = torch.broadcast_to(here.value(spec.score, {"s": scores}, allowed), scores.shape)
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)
        found[:, :, rows] = scores.amax(-1)
    return found
