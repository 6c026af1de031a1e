"""Dropout from torch: who draws, and that every way drops the same weights."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.device.arrays import ArgumentError
from attngen.torch import Attention, activated, attention, flash_attn_func, flash_attn_varlen_func
from tests import tiers
from tests.torch.tensors import BACKEND, randn

P = 0.5


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [randn(1, 2, 40, 16, dtype=torch.float32).requires_grad_() for _ in range(3)]


def gradients(o: torch.Tensor, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(o.square().sum(), of)


def test_the_generator_or_a_seed_says_which_weights_are_dropped() -> None:
    q, k, v = given = tensors()
    torch.manual_seed(3)
    first, second = attention(q, k, v, dropout_p=P, mode="naive"), attention(q, k, v, dropout_p=P, mode="naive")
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v, dropout_p=P, mode="naive"), first)
    assert not torch.equal(first, second)
    by_seed = attention(q, k, v, dropout_p=P, seed=2**64 - 1, offset=5, mode="naive")
    arrays = [t.detach().numpy() for t in given]
    assert (attngen.attention(*arrays, dropout_p=P, seed=-1, offset=5, mode="naive") == by_seed.detach().numpy()).all()
    by_torch = attention(q, k, v, dropout_p=P, seed=-1, offset=5, mode="math")
    torch.testing.assert_close(by_torch, by_seed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(by_torch, given), gradients(by_seed, given), atol=1e-4, rtol=1e-4)
    with pytest.raises(ArgumentError, match="pass seed="):
        attngen.attention(*arrays, dropout_p=P, mode="naive")


def test_a_checkpoint_drops_the_same_again() -> None:
    q, k, v = given = tensors()
    results = []
    for run in (
        lambda *a: attention(*a, dropout_p=P, mode="naive"),
        lambda *a: checkpoint(lambda *b: attention(*b, None, P, mode="naive"), *a, use_reentrant=False),
    ):
        torch.manual_seed(7)
        results.append(gradients(run(q, k, v), given))
    torch.testing.assert_close(*results, atol=0, rtol=0)


def test_compiled_calls_draw_each_time() -> None:
    q, k, v = given = tensors()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, None, P, mode="naive"), fullgraph=True, backend=BACKEND)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    assert all(torch.isfinite(g).all() for g in gradients(first, given))


def test_a_layer_drops_in_training_alone() -> None:
    q, k, v = tensors()
    for layer, without in (
        (Attention(mask="causal", dropout=P, mode="naive"), Attention(mask="causal", mode="naive")),
        (Attention(dropout=P, mode="naive"), Attention(mode="naive")),
        (Attention(attngen.define(dtype="fp32", head_dim=16, dropout=P), mode="naive"), Attention(mode="naive")),
    ):
        expected = without(q, k, v)
        assert not torch.equal(layer(q, k, v), expected)
        assert torch.equal(layer(q, k, v, seed=1), layer(q, k, v, seed=1))
        layer.eval()
        assert torch.equal(layer(q, k, v), expected)


@pytest.mark.long
def test_torchs_layer_trains_with_dropout_of_weights() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    layer.self_attn.dropout = P
    x = randn(2, 20, 32, dtype=torch.float32)
    with activated(emulated=True):
        y = layer(x)
        y.square().sum().backward()
        assert not torch.equal(layer(x), y)
        layer.eval()
        assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("mode", tiers.cases(["naive", "tiled", "fused", "wgmma", "hopper"], quick=["naive"]))
def test_packed_sequences_drop_what_a_batch_of_them_drops(mode: str) -> None:
    element = torch.float16 if mode in ("wgmma", "hopper") else torch.float32
    q, k, v = (torch.randn(2, 70, 2, 16).to(element).requires_grad_(mode != "wgmma") for _ in range(3))
    begins = torch.tensor([0, 70, 140], dtype=torch.int32)
    results = []
    for call in (
        lambda: flash_attn_func(q, k, v, P, mode=mode),
        lambda: flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), begins, begins, 70, 70, P, mode=mode).view(
            2, 70, 2, 16
        ),
    ):
        torch.manual_seed(5)
        o = call()
        results.append((o,) if mode == "wgmma" else (o, *gradients(o, [q, k, v])))  # wgmma has no backward
    torch.testing.assert_close(*results, atol=1e-5 if element is torch.float32 else 2e-2, rtol=1e-5)


def test_vmap_needs_to_know_about_randomness() -> None:
    q, k, v = (torch.stack([t.detach()] * 2) for t in tensors())
    call = torch.func.vmap(lambda q, k, v: attention(q, k, v, dropout_p=P), randomness="same")
    o = call(q, k, v)
    assert torch.equal(o[0], o[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(lambda q, k, v: attention(q, k, v, dropout_p=P))(q, k, v)
