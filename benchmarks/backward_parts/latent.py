"""Heads of 192 columns whose values have 128, as latent attention is trained, beside cuDNN's backward and FlashAttention's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from cell import CUDNN, TOKENS, Cell, Row, rates
from words import Mark, geometric_mean, least, markdown, worst

from attngen.bench.measure import measure_bursts
from attngen.bench.peers import flash_peers, torch_peers
from attngen.torch import Attention
from backward_parts import backwards, leaves, operations

EACH = 1.05
SIDES = ("attngen", "in order", CUDNN, "FlashAttention-3", "FlashAttention-4")
CELLS = [
    Cell("bf16", 192, mask, TOKENS // s, 16, s, s, head_dim_v=128) for mask in (None, "causal") for s in (1024, 4096, 16384)
]


def rows(rounds: int) -> Iterator[Row]:
    """`in order`: attngen's gradients with the same bits in every run, by two kernels."""
    for cell in CELLS:
        tensors = cell.randn()
        q, k, v = leaves(tensors)
        ours = {n: partial(Attention(cell.spec, deterministic=d), q, k, v) for n, d in (("attngen", False), ("in order", True))}
        with torch.enable_grad():
            peers = torch_peers(cell.spec, q, k, v, only=[CUDNN]) | flash_peers(cell.spec, q, k, v)
        found = measure_bursts(backwards({**ours, **peers}, (q, k, v)), rounds)
        ratio = min((found.ratio("attngen", peer) for peer in peers), default=float("nan"))
        yield {"case": cell.title, "tflops": rates(operations(cell, tensors), found.medians()), "ratio": ratio}


def table(rows: list[Row]) -> str:
    sides = [s for s in SIDES if any(s in r["tflops"] for r in rows)]
    lines = [
        (r["case"], *(f"{r['tflops'][s]:.0f}" if s in r["tflops"] else "-" for s in sides), f"{r['ratio']:.3f}") for r in rows
    ]
    text = markdown(("TFLOP/s, 16 heads, 16384 tokens", *sides, "ratio to the fastest peer"), lines)
    mean = geometric_mean([r["ratio"] for r in rows])
    return f"{text}\n\nGoal: each {EACH:.2f}. Measured: geometric mean {mean:.3f}, least {least(rows, lambda r: r['ratio'])}."


def marks(rows: list[Row]) -> list[Mark]:
    return [worst("heads of 192/128, over the fastest peer", rows, lambda r: r["ratio"], EACH)]
