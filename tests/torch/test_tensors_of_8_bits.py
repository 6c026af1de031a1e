"""Queries, keys and values of 8 bits in torch's functions: results are bf16, and flash-attention's have scales."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from attngen.device.arrays import ArgumentError, ArgumentTypeError  # noqa: E402
from attngen.torch import attention, flash_attn_func, flash_attn_varlen_func  # noqa: E402
from attngen.torch import flash_attn_3 as version_3  # noqa: E402

E4M3 = torch.float8_e4m3fn
MOST = 2e-2  # error of O in bf16, of randn values times scales of up to 1.5


def drawn(batch: int = 2, length: int = 20) -> list[Tensor]:
    """q, k and v [batch, length, heads, 64], of 4 heads over 2."""
    torch.manual_seed(0)
    return [torch.randn(batch, length, heads, 64).to(E4M3) for heads in (4, 2, 2)]


def expected(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor | float) -> Tensor:
    """Causal attention in float64 [batch, length, heads, 64]."""
    whole = [t.double().transpose(1, 2) for t in (q, k, v)]
    for i, scale in enumerate(scales):
        whole[i] = whole[i] * (scale if isinstance(scale, float) else of_heads(scale, i == 0))
    found = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2)


def of_heads(scale: Tensor, queries: bool) -> Tensor:
    """Scales [batch, kv_heads] for rows of each head; those of queries hold for the query heads of a key head."""
    return (scale.repeat_interleave(2, 1) if queries else scale).double()[:, :, None, None]


def test_attention_of_8_bits_is_bf16() -> None:
    q, k, v = drawn()
    for mode in ("tiled", "math"):
        found = attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True, mode=mode)
        assert found.dtype is torch.bfloat16
        assert (found.transpose(1, 2).double() - expected(q, k, v)).abs().max() < MOST


def test_flash_attention_3s_scales() -> None:
    """Dense and packed, by the functions of both names."""
    tensors = drawn()
    q, k, v = tensors
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    wanted = expected(q, k, v, *scales)
    dense = flash_attn_func(q, k, v, causal=True, mode="tiled", **named)
    assert dense.dtype is torch.bfloat16
    assert (dense.double() - wanted).abs().max() < MOST
    assert torch.equal(version_3.flash_attn_func(q, k, v, causal=True, mode="tiled", **named), dense)
    begins = torch.tensor([0, 20, 40], dtype=torch.int32)
    packed = flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in tensors), begins, begins, 20, 20, causal=True, mode="tiled", **named
    )
    assert torch.equal(packed.unflatten(0, (2, 20)), dense)
    alone = flash_attn_func(q, k, v, causal=True, mode="tiled", q_descale=scales[0])
    assert (alone.double() - expected(q, k, v, scales[0])).abs().max() < MOST


def test_other_scales_are_refused() -> None:
    q, k, v = drawn(1, 3)
    with pytest.raises(ArgumentTypeError, match="`q_descale` is a str; expected a number or a tensor"):
        flash_attn_func(q, k, v, q_descale="1")
    with pytest.raises(ArgumentError, match=r"`v_descale` is \[3\]; expected what broadcasts to"):
        flash_attn_func(q, k, v, v_descale=torch.ones(3))
    with pytest.raises(ArgumentError, match="`q_descale` is of queries of 8 bits, and `q` has elements of float16"):
        flash_attn_func(q.half(), k, v, q_descale=1.0)
    with pytest.raises(ArgumentError, match="expected keys and values of 8 bits"):
        flash_attn_func(q, k.half(), v.half())
