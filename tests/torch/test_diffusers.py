"""attngen as a backend of diffusers' dispatcher, by transformers of diffusers with random weights, against its own backend."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn  # noqa: E402

import attngen.diffusers  # noqa: E402
from attngen.device.arrays import ArgumentError  # noqa: E402


def result(backend: str, *tensors, **keywords):
    """O and the gradients of the float tensors."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    with attention_backend(backend):
        o = dispatch_attention_fn(*leaves, **keywords)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


@pytest.mark.long(one_of=1)
@pytest.mark.parametrize("mask", [None, "keys", "pairs", "bias", "causal"])
def test_the_dispatcher_calls_it(mask: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 19, 4, 16), torch.randn(2, 23, 4, 16), torch.randn(2, 23, 4, 16)
    masks = {
        None: None, "causal": None, "keys": torch.arange(23)[None, :] < torch.tensor([[23], [11]]),
        "pairs": torch.rand(2, 1, 19, 23) < 0.8, "bias": torch.randn(1, 4, 19, 23),
    }  # fmt: skip
    keywords = {"attn_mask": masks[mask], "is_causal": mask == "causal", "scale": 0.3}
    for own, theirs in zip(result("attngen", q, k, v, **keywords), result("native", q, k, v, **keywords), strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.long(one_of=1)
def test_a_transformer_of_diffusers() -> None:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8), "joint_attention_dim": 32}
    model = FluxTransformer2DModel(in_channels=8, num_layers=1, num_single_layers=1, pooled_projection_dim=16, **sizes)
    call = {
        "hidden_states": torch.randn(1, 20, 8), "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([0.5]),
        "img_ids": torch.randn(20, 3), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    found = []
    for backend in ("native", "attngen"):
        model.set_attention_backend(backend)
        model.zero_grad()
        output = model(**call).sample
        output.square().mean().backward()
        found.append((output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)))
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-5, rtol=1e-4)


def test_what_is_not_supported_is_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ArgumentError, match='no context parallelism; set_attention_backend\\("native"\\)'):
        attngen.diffusers.attend(q, q, q, _parallel_config=object())
