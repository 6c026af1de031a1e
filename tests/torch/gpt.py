"""A small GPT whose attention is given: torch's, or attngen's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        packed = self.project(self.norm_1(x))  # [batch, length, 3 * width], split by view as GPT-2 has it
        q, k, v = (part.view(batch, length, self.heads, -1) for part in packed.split(width, dim=2))
        x = x + self.out(self.attend(q, k, v).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Logits [batch, length, VOCABULARY] of tokens [batch, length]. `attend` maps q, k, v [batch, length, heads, size] to O."""

    def __init__(self, attend: Callable[..., torch.Tensor], width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(2048, width)
        self.blocks = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def torch_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def pair(attend: Callable[..., torch.Tensor], device: str, dtype: torch.dtype, **sizes: int) -> tuple[Gpt, Gpt]:
    """(the model with torch's attention, the same with `attend`), in eval mode without gradients."""
    torch.manual_seed(0)
    ours = Gpt(attend, **sizes).to(device, dtype).eval().requires_grad_(False)
    theirs = Gpt(torch_attend, **sizes).to(device, dtype).eval().requires_grad_(False)
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours
