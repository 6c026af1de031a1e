"""What the tests of flex_attention share: tensors, torch's results in float64, and calls that torch compiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as theirs

from attngen.torch import create_block_mask, flex_attention
from tests.torch.mods import BATCH, HEADS, LENGTH, Mod


def randn(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def qkv(length: int = LENGTH, kv_len: int = LENGTH, size: int = 16, kv_heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    return randn(BATCH, HEADS, length, size), randn(BATCH, kv_heads, kv_len, size), randn(BATCH, kv_heads, kv_len, size + 8)


def expected(q: Any, k: Any, v: Any, score: Any = None, mask: Any = None, scale: float | None = None) -> tuple[Any, Any, Any]:
    """torch's eager FlexAttention in float64: (output, lse, largest scores)."""
    blocks = theirs._create_empty_block_mask(q, k) if mask is None else mask
    function = (lambda *a: blocks.mask_mod(*a), *blocks.as_tuple()[:-1])
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    out, lse, largest = math_attention(
        q.double(), k.double(), v.double(), score or theirs._identity, (*function[1:], function[0]), scale, {}
    )
    return out, lse * math.log(2), largest * math.log(2)


def check(mod: Mod, options: Any = None, **tolerance: float) -> None:
    """Output and gradients of a mod against torch's."""
    tensors = (*qkv(), *mod.captured)
    blocks = None if mod.mask is None else create_block_mask(mod.mask, BATCH, HEADS, LENGTH, LENGTH, "cpu", 16)
    found = flex_attention(*tensors[:3], mod.score, blocks, kernel_options=options)
    wanted = expected(*tensors[:3], mod.reference or mod.score, blocks)[0]
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    weights = randn(*found.shape).detach()
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    for tensor, one, other in zip(tensors, gradients, torch.autograd.grad((wanted * weights).sum(), tensors), strict=True):
        assert one.dtype is tensor.dtype
        torch.testing.assert_close(one, other, **tolerance)


def compiles(function: Any, **keywords: Any) -> tuple[Any, list[int]]:
    """`function` without graph breaks, and one item for each of its graphs."""
    from torch._dynamo.backends.debugging import aot_eager

    count: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        count.append(1)
        return aot_eager(graph, examples)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **keywords), count
