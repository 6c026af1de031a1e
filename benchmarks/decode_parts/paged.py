"""Padded keys and keys in pages beside the same keys in a dense cache: of one query row, and of a causal prompt of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cell import Row
from words import markdown

import attngen
from attngen.spec.attention import KernelRequest
from decode_parts import Cache, Call, Tensors, attngen_calls, in_graphs

CELLS = (Cache(1, 8192), Cache(1, 65536), Cache(16, 8192), Cache(64, 8192))
# By the name of a side: rows of a page, whether a page has the heads of a row side by side, whether the spec states page_size,
# whether queries are packed
SIDES = {
    "pages of 16": (16, True, False, False), "of 64": (64, True, False, False), "of 256": (256, True, False, False),
    "of 16, heads first": (16, False, False, False), "of 16, stated": (16, True, True, False),
    "of 64, stated": (64, True, True, False),
    "of 64, stated, packed queries": (64, True, True, True),
}  # fmt: skip
PROMPTS = (Cache(4, 2048, rows=2048), Cache(1, 8192, rows=8192))
DENSE, PORTABLE, PADDED = "dense", "dense, fused", "padded"
SHARES, PROMPT_SHARE = {16: 0.9, 64: 0.95, 256: 0.95}, 0.9


def rows(rounds: int) -> Iterator[Row]:
    for cell in (*CELLS, *PROMPTS):
        spec = attngen.define(name="plain", dtype=cell.dtype, head_dim=cell.head_dim, mask=mask_of(cell))
        tensors = cell.tensors()[: 4 if cell in PROMPTS else None]
        sides: dict[str, Sequence[Call]] = {DENSE: attngen_calls(spec, tensors, {})}
        lengths = {"seqused": torch.full((cell.batch,), cell.keys, device="cuda", dtype=torch.int32)}
        sides[PADDED] = attngen_calls(replace(spec, kernel=KernelRequest(storage="padded")), tensors, lengths)
        if cell in PROMPTS:
            sides[PORTABLE] = attngen_calls(replace(spec, kernel=KernelRequest("fused")), tensors, {})
        sides |= {name: paged_calls(cell, tensors, *how) for name, how in SIDES.items()}
        us = {name: 1e3 * t for name, t in in_graphs(sides, rounds).medians().items()}
        yield {"case": cell.title, "us": us}
        del tensors, sides
        torch.cuda.empty_cache()


def mask_of(cell: Cache) -> str | None:
    return "causal_bottom_right" if cell in PROMPTS else None


def paged_calls(
    cell: Cache,
    tensors: Sequence[Tensors],
    page: int,
    heads_inside: bool,
    stated: bool,
    packed: bool,
    package: Any = attngen,
    dtype: Any = None,
) -> list[Call]:
    """Calls that read the memory of dense K and V as a pool, whose pages each sequence has in random order.

    `dtype` has the spec's types where K and V have others than the cell's.
    """
    keywords = {"page_size": page} if stated else {}
    storage = "packed_paged" if packed else "paged"
    spec = package.define(
        name="paged", dtype=dtype or cell.dtype, head_dim=cell.head_dim, mask=mask_of(cell), storage=storage, **keywords
    )
    compiled = package.compile(spec, device="cuda")
    pages = cell.batch * cell.keys // page
    shape = (pages, page, cell.kv_heads, cell.head_dim) if heads_inside else (pages, cell.kv_heads, page, cell.head_dim)
    table = torch.randperm(pages, device="cuda").int().view(cell.batch, -1)
    seqused = torch.full((cell.batch,), cell.keys, device="cuda", dtype=torch.int32)
    pools = [(q, *(t.view(shape).transpose(1, 2) if heads_inside else t.view(shape) for t in kv)) for q, *kv in tensors]
    where = {"page_table": table, "seqused": seqused}
    if packed:
        begins = torch.arange(0, (cell.batch + 1) * cell.rows, cell.rows, device="cuda", dtype=torch.int32)
        where |= {"cu_seqlens_q": begins, "max_q_len": cell.rows}
        pools = [(q.transpose(1, 2).flatten(0, 1), *kv) for q, *kv in pools]
    return [partial(compiled, *one, **where) for one in pools]


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        us, sides = r["us"], (PORTABLE, PADDED, *SIDES)
        cells = (f"{us[s]:.1f} ({us[DENSE] / us[s]:.1%})" if s in us else "-" for s in sides)
        lines.append((r["case"], f"{us[DENSE]:.1f}", *cells))
    text = markdown(("us (of dense's rate)", DENSE, PORTABLE, PADDED, *SIDES), lines)
    goal = f"one row: pages of 16 at least {SHARES[16]:.0%} of dense's rate, of 64 and more {SHARES[64]:.0%}"
    return f"{text}\n\nGoal: {goal}; a prompt: pages of 64 and more at least {PROMPT_SHARE:.0%}."
