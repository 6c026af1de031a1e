"""Language models with random weights, with torch's attention or attngen's: their logits and the gradients of their parameters.

Hugging Face's models take an attention by name: `transformers.AttentionInterface` knows the function, and
`transformers.AttentionMaskInterface` what makes the masks that it is given (without one, padding is silently not masked).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attngen.torch import Attention, attention
from tests.torch.gpt import VOCABULARY, Gpt, torch_attend

LAYERS, WIDTH, HEADS = 4, 32, 4
MODELS = ("gpt", "gpt2", "llama")  # llama: two query heads for a head of keys, and RoPE
PADDING = 3  # tokens in front of the second row


def register(mode: str) -> str:
    """The name of attngen's attention by `mode`, for Hugging Face's models."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        output = attention(
            query, key, value, attention_mask, dropout, attention_mask is None, scaling, enable_gqa=True, mode=mode
        )
        return output.transpose(1, 2).contiguous(), None

    name = f"attngen_{mode}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def gpt2(implementation: str, scale: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=WIDTH * scale, n_layer=LAYERS, n_head=HEADS, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation=implementation,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(implementation: str, scale: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH * scale, intermediate_size=2 * WIDTH * scale, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, attn_implementation=implementation,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Logits(nn.Module):
    """Logits [batch, length, VOCABULARY] of tokens [batch, length] by one of Hugging Face's models."""

    def __init__(self, model: nn.Module, padded: bool) -> None:
        super().__init__()
        self.model, self.padded = model, padded

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = None
        if self.padded:
            mask = torch.ones_like(tokens)
            mask[1, :PADDING] = 0
        return self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits


def model(name: str, mode: str | None, way: str, scale: int = 1) -> nn.Module:
    """`name` in training mode, with the same weights at each call. `mode` is attngen's, or None for torch's attention; `way`
    is eager, compiled, checkpointed, or padded: with a mask of the tokens."""
    torch.manual_seed(0)
    if name == "gpt":
        own = torch_attend if mode is None else Attention(mask="causal", layout="bshd", mode=mode)
        attend: Callable[..., Any] = own
        if way == "checkpointed":
            attend = lambda *t: checkpoint(own, *t, use_reentrant=False)  # noqa: E731
        return Gpt(attend, width=WIDTH * scale, heads=HEADS, layers=LAYERS)
    found = {"gpt2": gpt2, "llama": llama}[name]("sdpa" if mode is None else register(mode), scale)
    if way == "checkpointed":
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Logits(found.train(), way == "padded")


def results(
    trained: nn.Module, tokens: torch.Tensor, call: Callable[..., torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The logits of `trained`, and the gradient of each parameter; `call` is what is called instead of it."""
    trained.zero_grad()
    logits = (trained if call is None else call)(tokens[:, :-1])
    seen = slice(PADDING, None)
    torch.nn.functional.cross_entropy(logits[:, seen].flatten(0, 1), tokens[:, 1:][:, seen].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in trained.named_parameters()}
    return {"logits": logits[:, seen].detach(), **{name: g for name, g in gradients.items() if g is not None}}


def expected(name: str, way: str, dtype: torch.dtype, tokens: torch.Tensor, scale: int = 1) -> dict[str, Any]:
    """The results with torch's attention, in float64 and in `dtype`."""
    way = "padded" if way == "padded" else "eager"
    return {
        kind: results(model(name, None, way, scale).to(tokens.device, number), tokens)
        for kind, number in (("exact", torch.float64), ("theirs", dtype))
    }


def wrong(found: dict[str, torch.Tensor], known: dict[str, Any], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Errors beyond their limits, with these: twice the error of the model with torch's attention, and one unit in the last
    place of the largest element, both against float64."""
    assert found.keys() == known["exact"].keys()
    errors = {}
    for name, exact in known["exact"].items():
        limit = 2 * _error(known["theirs"][name], exact) + torch.finfo(dtype).eps * float(exact.abs().max())
        error = _error(found[name], exact)
        if not error <= limit:
            errors[name] = error, limit
    return errors


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max())


def some_tokens(length: int, device: str) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
