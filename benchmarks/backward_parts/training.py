"""Training steps of a small GPT under torch.compile, beside the same model with cuDNN's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from cell import CUDNN, Row
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from words import Mark, markdown, worst

from attngen.bench.measure import measure_bursts
from attngen.torch import attention

GOAL = 1.15
BATCH, LENGTH, LAYERS, VOCABULARY = 2, 8192, 4, 8192
SHAPES = ((1024, 16), (1024, 8), (2048, 16))  # width, heads

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.project(self.norm_1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = packed.transpose(1, 3).unbind(2)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Logits [batch, length, VOCABULARY] of tokens [batch, length]."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, attend) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, is_causal=True, deterministic=False)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def rows(rounds: int) -> Iterator[Row]:
    for width, heads in SHAPES:
        torch._dynamo.reset()
        steps = {name: step(width, heads, attend) for name, attend in (("attngen", ours), (CUDNN, cudnn))}
        found = measure_bursts(steps, rounds, milliseconds=100.0)
        tokens = {name: BATCH * LENGTH / ms for name, ms in found.medians().items()}
        case = f"width {width}, {heads} heads of {width // heads}"
        yield {"case": case, "tokens_a_ms": tokens, "ratio": found.ratio("attngen", CUDNN)}


def step(width: int, heads: int, attend: Attend) -> Callable[[], None]:
    """A training step: forward, backward and AdamW, in bf16 by autocast, always on the same tokens."""
    torch.manual_seed(0)
    model = torch.compile(Gpt(width, heads, attend).cuda(), fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")

    def once() -> None:
        with torch.enable_grad():
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens)
                loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


def table(rows: list[Row]) -> str:
    lines = (
        (r["case"], f"{r['tokens_a_ms']['attngen']:.0f}", f"{r['tokens_a_ms'][CUDNN]:.0f}", f"{r['ratio']:.3f}") for r in rows
    )
    titles = (f"tokens a millisecond, {LAYERS} layers, B{BATCH} S{LENGTH}", "attngen", CUDNN, "ratio")
    return f"{markdown(titles, lines)}\n\nGoal: a ratio of {GOAL}."


def marks(rows: list[Row]) -> list[Mark]:
    return [worst("a training step over cuDNN's", rows, lambda r: r["ratio"], GOAL)]
