"""flex_attention on the GPU: masks and scores of FlexAttention in kernels, eager and compiled, against torch's eager one."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from torch._higher_order_ops.flex_attention import math_attention  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from attngen.torch import AuxRequest, create_block_mask, flex_attention  # noqa: E402
from tests.torch.mods import BATCH, HEADS, LENGTH, Mod, causal, mods, windowed  # noqa: E402

NAMES = [mod.name for mod in mods()]


@functools.cache
def on_gpu() -> dict[str, Mod]:
    with torch.device("cuda"):
        return {mod.name: mod for mod in mods()}


def qkv(dtype: Any, length: int = LENGTH, size: int = 64) -> tuple[Any, ...]:
    make = torch.Generator("cuda").manual_seed(length)
    shape = (BATCH, HEADS, length, size)
    return tuple(torch.randn(shape, device="cuda", generator=make).to(dtype).requires_grad_() for _ in range(3))


def exact(q: Any, k: Any, v: Any, score: Any, mask: Any) -> Any:
    """torch's eager FlexAttention in float64."""
    lists = theirs._create_empty_block_mask(q, k)
    if mask is not None:
        plain = lambda b, h, q, k: mask(b, h, q, k)  # noqa: E731  # theirs takes no methods
        lists = theirs.create_block_mask(plain, BATCH, HEADS, q.shape[2], k.shape[2], "cuda")
    scale = 1 / math.sqrt(q.size(-1))
    return math_attention(q.double(), k.double(), v.double(), score or theirs._identity, lists.as_tuple(), scale, {})[0]


def check(found: Any, wanted: Any, tensors: tuple[Any, ...], allowed: float) -> None:
    """Output and gradients, each relative to its largest element."""
    weights = torch.randn(found.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(found.dtype)
    gradients = [torch.autograd.grad((o * weights).sum(), tensors) for o in (found, wanted)]
    for one, other in ((found, wanted), *zip(*gradients, strict=True)):
        assert not one.isnan().any()
        error = float((one.double() - other.double()).abs().max()) / max(float(other.abs().max()), 1e-3)
        assert error <= allowed, f"{tuple(one.shape)}: {error:.1e} of the largest element"


@pytest.mark.parametrize("name", NAMES)
def test_mods_in_kernels(name: str) -> None:
    mod = on_gpu()[name]
    dtype = torch.float32 if NAMES.index(name) % 5 == 0 else torch.bfloat16
    tensors = (*qkv(dtype), *mod.captured)
    blocks = None if mod.mask is None else create_block_mask(mod.mask, BATCH, HEADS, LENGTH, LENGTH, "cuda", 16)
    found = flex_attention(*tensors[:3], mod.score, blocks)
    check(found, exact(*tensors[:3], mod.reference or mod.score, mod.mask), tensors, 3e-2 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("name", ["documents with an inner mask", "t5"])
def test_mods_by_torch_compile(name: str) -> None:
    mod = on_gpu()[name]
    tensors = (*qkv(torch.bfloat16), *mod.captured)
    blocks = None if mod.mask is None else create_block_mask(mod.mask, BATCH, HEADS, LENGTH, LENGTH, "cuda", 16)
    compiled = torch.compile(lambda q, k, v: flex_attention(q * 1.0, k, v, mod.score, blocks), fullgraph=True)
    check(compiled(*tensors[:3]), exact(*tensors[:3], mod.reference or mod.score, mod.mask), tensors, 3e-2)


@pytest.mark.parametrize("length", [300, 1024])
def test_lists_of_torchs_masks(length: int) -> None:
    """Partial blocks have another function than the lists were made of; full ones do not ask it."""
    tensors = qkv(torch.bfloat16, length)
    blocks = theirs.create_block_mask(causal, None, None, length, length, "cuda", 128)
    blocks.mask_mod = windowed(100)
    allowed = torch.zeros(length, length, dtype=torch.bool, device="cuda")
    i, j = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    partial = (i // 128 == j // 128) | (i // 128 == length // 128)  # torch's list has no full block of fewer rows
    allowed |= torch.where(partial, (i >= j) & (i - j < 100), i >= j)
    found, aux = flex_attention(*tensors, block_mask=blocks, return_aux=AuxRequest(lse=True, max_scores=True))
    check(found, exact(*tensors, None, lambda b, h, q, k: allowed[q, k]), tensors, 3e-2)
    assert aux.lse.isfinite().all()
    assert (aux.max_scores <= aux.lse + 1e-3).all()
