"""The cost of rotary embeddings: of a causal prompt, and of a row that is appended to a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from cell import Row
from words import markdown

import attngen
from attngen.spec.attention import AttentionSpec
from attngen.torch import Attention, flash_attn_with_kvcache
from decode_parts import Cache, Call, Tensors, in_graphs

PROMPTS = (Cache(4, 2048, rows=2048), Cache(1, 8192, rows=8192))
STEPS = (Cache(1, 8192), Cache(16, 8192))
NONE, STATED, BY_TORCH = "not rotated", "rotary", "rotated by torch.compile"
READ, APPENDED, ROTATED = "keys read", "a row appended", "appended and rotated"
DECODED = "the same by Attention.decode"


def rows(rounds: int) -> Iterator[Row]:
    for cell in (*PROMPTS, *STEPS):
        tensors = cell.tensors()[: 4 if cell in PROMPTS else None]
        sides = prompt_sides(cell, tensors) if cell in PROMPTS else step_sides(cell, tensors)
        yield {"case": cell.title, "us": {name: 1e3 * t for name, t in in_graphs(sides, rounds).medians().items()}}
        del tensors, sides
        torch.cuda.empty_cache()


def spec_of(cell: Cache, rotates: bool) -> AttentionSpec:
    inputs = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", cell.head_dim // 2)))
    keywords = {"rotary": f"{cell.head_dim} halves by cosines, sines", "inputs": inputs} if rotates else {}
    return attngen.define(name="prompt", dtype=cell.dtype, head_dim=cell.head_dim, mask="causal", **keywords)


def tables(cell: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each position."""
    frequencies = 10000.0 ** (-torch.arange(cell.head_dim // 2, device="cuda") * 2 / cell.head_dim)
    angles = torch.arange(cell.keys, device="cuda")[:, None] * frequencies
    return angles.cos(), angles.sin()


def prompt_sides(cell: Cache, tensors: Sequence[Tensors]) -> dict[str, Sequence[Call]]:
    plain, rotary = (attngen.compile(spec_of(cell, rotates), device="cuda") for rotates in (False, True))
    cosines, sines = tables(cell)
    named = {"cosines": cosines, "sines": sines}
    turn = torch.compile(partial(turned, cosines=cosines, sines=sines))

    def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return plain(turn(q), turn(k), v)

    return {
        NONE: [partial(plain, *one) for one in tensors],
        STATED: [partial(rotary, *one, **named) for one in tensors],
        BY_TORCH: [partial(by_torch, *one) for one in tensors],
    }


def turned(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rows [batch, heads, length, size], rotated as a model does it, in fp32."""
    x, y = rows.float().chunk(2, -1)
    return torch.cat((x * cosines - y * sines, x * sines + y * cosines), -1).to(rows.dtype)


def step_sides(cell: Cache, tensors: Sequence[Tensors]) -> dict[str, Sequence[Call]]:
    """Calls of flash-attention's function, whose caches are [batch, keys, heads, size]."""
    lasting = [[t.transpose(1, 2) for t in one] for one in tensors]
    used = torch.full((cell.batch,), cell.keys - 1, device="cuda", dtype=torch.int32)
    new = torch.randn(cell.batch, 1, cell.kv_heads, cell.head_dim, device="cuda", dtype=torch.bfloat16)
    cosines, sines = tables(cell)
    rotary = {"rotary_cos": cosines, "rotary_sin": sines, "rotary_interleaved": False}
    declared = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", cell.head_dim // 2)))
    stated = f"{cell.head_dim} halves by cosines, sines"
    layer = Attention(mask="causal", rotary=stated, inputs=declared, enable_gqa=True, layout="bshd")
    call = partial(flash_attn_with_kvcache, causal=True)
    appended = {"k": new, "v": new, "cache_seqlens": used}
    return {
        READ: [partial(call, *one, cache_seqlens=used) for one in lasting],
        APPENDED: [partial(call, *one, **appended) for one in lasting],
        ROTATED: [partial(call, *one, **appended, **rotary) for one in lasting],
        DECODED: [partial(layer.decode, *one, **appended, cosines=cosines, sines=sines) for one in lasting],
    }


def table(rows: list[Row]) -> str:
    found = []
    for first in (NONE, READ):
        chosen = [r for r in rows if first in r["us"]]
        sides = list(chosen[0]["us"]) if chosen else []
        lines = [(r["case"], *(f"{r['us'][s]:.1f} (+{r['us'][s] - r['us'][first]:.1f})" for s in sides)) for r in chosen]
        found.append(markdown(("us", *sides), lines))
    return "\n\n".join(found)
