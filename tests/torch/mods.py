"""Masks and scores as people write them for FlexAttention, each with the tensors whose gradients are wanted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

BATCH, HEADS, LENGTH = 2, 2, 40


@dataclass
class Mod:
    """One attention. `captured` require grad. `reference` is the score as torch's own eager code can differentiate it."""

    name: str
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captured: tuple[torch.Tensor, ...] = field(default_factory=tuple)
    reference: Callable[..., Any] | None = None


def causal(b, h, q, k):
    return q >= k


def windowed(size: int):
    def window(b, h, q, k):
        return (q >= k) & (q - k < size)

    return window


class _Tanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Window:
    """A callable object with a number without dimensions."""

    def __init__(self, size: torch.Tensor, sink: int) -> None:
        self.size, self.config = size, {"sink": sink}

    def near(self, q, k):
        return (q - k).abs() < self.size

    def __call__(self, b, h, q, k):
        return self.near(q, k) | (k < self.config["sink"])

    def method(self, b, h, q, k):
        return self.near(q, k) & (q >= k)


def interleaved(x):
    x = x & 0x0000FFFF
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    return (x | (x << 2)) & 0x33333333


def of_prefix(prefix, b, h, q, k, *, extra=0):
    return k < prefix[b] + extra


def t5_bucket(relative, count=32, most=128):
    bucket = torch.where(relative > 0, count // 2, 0)
    relative, exact = torch.abs(relative), count // 4
    large = exact + (torch.log(relative.float() / exact) / math.log(most / exact) * (count // 2 - exact)).to(torch.long)
    large = torch.min(large, torch.full_like(large, count // 2 - 1))
    return bucket + torch.where(relative < exact, relative, large)


def mods() -> Iterator[Mod]:
    torch.manual_seed(3)
    doc = torch.tensor([0] * 13 + [1] * 17 + [2] * 10)
    offsets = torch.tensor([0, 13, 30, 40])
    docs = torch.stack([doc, doc.flip(0)]).int()

    def documents(inner):
        def mask(b, h, q, k):
            return (doc[q] == doc[k]) & inner(b, h, q - offsets[doc[q]], k - offsets[doc[k]])

        return mask

    yield Mod("documents with an inner mask", mask=documents(windowed(7)))
    yield Mod("documents of each batch", mask=lambda b, h, q, k: (docs[b, q] == docs[b][k]) & (q >= k))
    yield Mod("packed", mask=and_masks(lambda b, h, q, k: docs[b, q] == docs[b, k], causal, lambda b, h, q, k: docs[b, k] > 0))
    prefix = torch.tensor([5, 11], dtype=torch.int32)
    yield Mod("prefix", mask=or_masks(functools.partial(of_prefix, prefix), causal))
    yield Mod("prefix and more", mask=or_masks(functools.partial(of_prefix, prefix, extra=2), causal))
    group, start = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 8, 16, 24, 32, 40])
    member = torch.arange(LENGTH) // 8

    def shared_prefix(b, h, q, k):
        mine = group[member[q]] == group[member[k]]
        return (q >= k) & (mine | (k < start[member[q] + 1] - 20))

    yield Mod("shared prefix", mask=shared_prefix)
    width = 8

    def neighbourhood(b, h, q, k):
        qx, qy, kx, ky = q // width, q % width, k // width, k % width
        cx, cy = qx.clamp(1, LENGTH // width - 2), qy.clamp(min=1, max=width - 2)
        return ((cx - kx).abs() <= 1) & ((cy - ky).abs() <= 1)

    yield Mod("neighbourhood", mask=neighbourhood)
    yield Mod("morton", mask=lambda b, h, q, k: (interleaved(q) ^ interleaved(k >> 1)) % 3 != 0)
    intervals, image = torch.tensor([[0, 9], [5, 20], [20, 40]]), torch.arange(LENGTH) // 14

    def images(b, h, q, k):
        interval = intervals[image[k]]
        return (q >= interval[0]) & (q < interval[1])

    yield Mod("images", mask=images)
    is_image, is_text = torch.arange(LENGTH) % 3 == 0, torch.arange(LENGTH) > 25
    yield Mod("flags", mask=lambda b, h, q, k: (is_image[q] | is_text[k]) & ~(is_image[k] ^ is_text[q]))
    tree = torch.rand(LENGTH, LENGTH) < 0.4
    yield Mod("tree", mask=lambda b, h, q, k: tree[q, k.clamp(min=0, max=LENGTH - 1)] | (q == k))
    half, block = LENGTH // 2, 4

    def block_diffusion(b, h, q, k):
        x0_q, x0_k = q >= half, k >= half
        block_q = torch.where(x0_q, (q - half) // block, q // block)
        block_k = torch.where(x0_k, (k - half) // block, k // block)
        same = (block_q == block_k) & (x0_q == x0_k)
        return same | ((block_q > block_k) & x0_k & ~x0_q) | ((block_q >= block_k) & x0_k & x0_q)

    yield Mod("block diffusion", mask=block_diffusion)

    def tiles(b, h, q, k):
        def place(i):
            tile = i // 8
            return tile // 2, (tile % 4) // 2, tile % 2

        return functools.reduce(lambda a, c: a & c, [(x - y).abs() <= 1 for x, y in zip(place(q), place(k), strict=True)])

    yield Mod("tiles", mask=tiles)
    yield Mod("bands", mask=lambda b, h, q, k: ((q - k).abs() < math.floor(37 / 4) * 2) | (k < 3))
    heads = HEADS
    yield Mod("alibi", score=lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / heads)), mask=causal)
    cap = 2
    yield Mod("soft-cap", score=lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    yield Mod("soft-cap as a function", score=lambda s, b, h, q, k: 2.0 * _Tanh.apply(s / 2.0))
    bias = torch.randn(HEADS, 20, requires_grad=True)
    distance = torch.randint(0, 20, (BATCH, LENGTH, LENGTH))
    yield Mod("relative bias by a table", lambda s, b, h, q, k: s + bias[h, distance[b, q, k]], captured=(bias,))
    dense = torch.randn(HEADS, LENGTH, LENGTH, requires_grad=True)
    yield Mod(
        "dense bias",
        lambda s, b, h, q, k: s + dense[h][q][k],
        captured=(dense,),
        reference=lambda s, b, h, q, k: s + dense[h, q, k],
    )
    rope_q, rope_k = (torch.randn(BATCH, n, LENGTH, 8, requires_grad=True) for n in (HEADS, 1))
    yield Mod(
        "latent",
        lambda s, b, h, q, k: s + 0.3 * torch.dot(rope_q[b, h, q], rope_k[b, h // heads, k]),
        captured=(rope_q, rope_k),
        reference=lambda s, b, h, q, k: s + 0.3 * (rope_q @ rope_k.mT)[b, h, q, k],
    )
    yield Mod(
        "products",
        lambda s, b, h, q, k: s + (rope_q[b, h][q] * rope_k[b, 0][k]).sum(-1),
        captured=(rope_q, rope_k),
        reference=lambda s, b, h, q, k: s + (rope_q @ rope_k.mT)[b, h, q, k],
    )
    yield Mod("relu", score=lambda s, b, h, q, k: torch.relu(s) + torch.nn.functional.silu(s))
    yield Mod("gelu", score=lambda s, b, h, q, k: torch.nn.functional.gelu(s) + torch.log1p(s.abs()))
    yield Mod("log", score=lambda s, b, h, q, k: s * torch.log(1.0 + (q - k).abs()) / math.log(10.0))
    yield Mod("methods", score=lambda s, b, h, q, k: s.sigmoid().exp() + s.tanh() - (s * s + 1).sqrt() + s.sin().erf())
    yield Mod("gated", score=lambda s, b, h, q, k: torch.where(q % 2 == 0, s, s.clamp(-1, 1)) + torch.tan(s * 0.1).pow(2))
    yield Mod("a score that masks", score=lambda s, b, h, q, k: torch.where(q >= k, s * 0.5, -float("inf")))
    padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 25:] = False
    left = torch.tensor([0, 6])

    def transformers_like(*functions):
        def mask(b, h, q, k):
            result = q.new_ones((), dtype=torch.bool)
            for function in functions:
                result = result & function(b, h, q, k).to(q.device)
            return result

        return mask

    yield Mod("padded", mask=transformers_like(causal, lambda b, h, q, k: padding[b, k], lambda b, h, q, k: k >= left[b]))
    four = (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.6).to(torch.int8)
    yield Mod("four dimensions", mask=lambda b, h, q, k: four[b][0][q][k].bool())
    embedding = torch.nn.Embedding(32, HEADS)
    yield Mod("t5", lambda s, b, h, q, k: s + embedding.weight[t5_bucket(k - q), h], captured=(embedding.weight,))
    window = Window(torch.tensor(6), 2)
    yield Mod("object", mask=window)
    yield Mod("bound method", mask=window.method)
    scale = torch.tensor(0.7, requires_grad=True)
    yield Mod("a number that learns", lambda s, b, h, q, k: s * scale, captured=(scale,))
    small, double = (
        torch.randint(0, 3, (LENGTH,), dtype=torch.uint8),
        torch.randn(LENGTH, dtype=torch.float64, requires_grad=True),
    )
    yield Mod(
        "other types", lambda s, b, h, q, k: s + double[k], lambda b, h, q, k: small[q] >= small[k].to(torch.int8), (double,)
    )
    holder = {"functions": (causal, [windowed(9), noop_mask])}
    yield Mod(
        "in containers", mask=lambda b, h, q, k: holder["functions"][0](b, h, q, k) & holder["functions"][1][0](b, h, q, k)
    )
    negative = torch.arange(LENGTH) - LENGTH
    yield Mod("negative indices", mask=lambda b, h, q, k: (doc[negative[q]] >= doc[k]) & (doc[-1] > 0))
    yield Mod(
        "signed distance",
        lambda s, b, h, q, k: s + bias[h, (q - k) % 20] + bias[h, torch.where(q > k, q - k, 0) // 3],
        captured=(bias,),
    )
    count = torch.tensor([3, -5])
    yield Mod("divided by data", mask=lambda b, h, q, k: (q % count[b] == k % 3) | (q == k))
    bits = torch.tensor([0b1011, 0b0110])
    yield Mod("bits of a number", mask=lambda b, h, q, k: ((bits[b] >> (k % 4)) & 1).bool() | (q == k))
    member_of = torch.randint(0, 5, (LENGTH, 3))
    yield Mod("any of a row", mask=lambda b, h, q, k: (member_of[q] == member_of[k, 0]).any() | (q == k))
