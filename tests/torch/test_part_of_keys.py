"""Layers whose values are a part of their keys, as in latent attention: calls, gradients, caches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attngen.torch  # noqa: E402
from attngen.diagnostics import ArgumentError  # noqa: E402
from attngen.torch import Attention  # noqa: E402

SPEC = attngen.define(dtype="bf16", head_dim=96, values=(0, 64), mask="causal_bottom_right")
Rows = torch.Tensor


def rows(*shape: int) -> Rows:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).bfloat16()


def expected(q: Rows, k: Rows) -> Rows:
    wide = k.double()
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q.double(), wide, wide[..., :64], attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("mode", ["auto", "math"])
def test_calls_and_gradients(mode: str) -> None:
    """Twice, as the second call repeats the launches of the first; compiled; in the other layout."""
    layer = Attention(SPEC, mode=mode)
    q, k = rows(1, 4, 9, 96).requires_grad_(), rows(1, 2, 11, 96).requires_grad_()
    exact = expected(q, k)
    dout = rows(1, 4, 9, 64)
    wanted = torch.autograd.grad(exact, (q, k), dout.double())
    for call in (layer, layer, torch.compile(layer, backend="aot_eager")):
        found = call(q, k)
        assert (found.double() - exact).abs().max() < 2e-2
        for ours, theirs in zip(torch.autograd.grad(found, (q, k), dout), wanted, strict=True):
            assert (ours.double() - theirs.double()).abs().max() < 3e-2 * theirs.abs().max()
    other = Attention(SPEC, mode=mode, layout="bshd")
    assert torch.equal(other(q.transpose(1, 2), k.transpose(1, 2)).transpose(1, 2), layer(q, k))


def test_a_compiled_spec_takes_tensors() -> None:
    kernel = attngen.compile(SPEC, device="emulated")
    q, k = rows(1, 2, 5, 96), rows(1, 1, 5, 96)
    assert (kernel(q, k).double() - expected(q, k)).abs().max() < 2e-2
    assert (kernel.math(q, k).double() - expected(q, k)).abs().max() < 2e-2


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mode", ["auto", "math"])
def test_a_cache_has_keys_alone(mode: str, paged: bool) -> None:
    """New rows are written to it once, and what they do not replace stays."""
    layer = Attention(SPEC, mode=mode)
    cache, q, new = rows(4, 2, 16, 96), rows(2, 4, 1, 96), rows(2, 2, 1, 96)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32) if paged else None
    lengths = torch.tensor([5, 14], dtype=torch.int32)
    before = cache.clone()
    found = layer.decode(q, cache, None, new, cache_seqlens=lengths, block_table=table)
    for b, length in enumerate(lengths.tolist()):
        page = int(table[b, 0]) if table is not None else b
        assert torch.equal(cache[page, :, length], new[b, :, 0])
        exact = expected(q[b : b + 1], cache[page : page + 1, :, : length + 1])
        assert (found[b : b + 1].double() - exact).abs().max() < 2e-2
        cache[page, :, length] = before[page, :, length]
    assert torch.equal(cache, before)


def test_what_is_given_too_much_or_too_little_is_refused() -> None:
    layer, q, k = Attention(SPEC), rows(1, 2, 5, 96), rows(1, 1, 5, 96)
    for call in (lambda: layer(q, k, k), lambda: layer.decode(q, k, k), lambda: layer.decode(q, k, None, k, k)):
        with pytest.raises(ArgumentError, match=r"`v` is k\[\.\.\., 0:64\] in this attention; leave it out"):
            call()
    with pytest.raises(ArgumentError, match="`v` was not given"):
        Attention()(q, k)
    with pytest.raises(ArgumentError, match="`v_cache` was not given"):
        Attention().decode(q, k)
