"""Latent attention (MLA) as it is decoded: one key head of 576 columns, of which the first 512 are the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from cell import Row
from words import markdown

import attngen
from attngen.reference.torch_oracle import torch_attention
from decode_parts import COLD_BYTES, MOST_CALLS, Call, in_graphs, read_rate

COLUMNS, VALUES, PAGE = 576, 512, 64
ATTNGEN, PAGES, TORCH = "attngen", "attngen, pages of 64", "torch, compiled"
MANY, FEW = 620.0, 3.3  # goals, B64 S4k: TFLOP/s of 128 heads, TB/s of 16


@dataclass(frozen=True, slots=True)
class Latent:
    """One call: `rows` query rows of each of `heads` heads, and `keys` rows of the cache of each sequence."""

    batch: int
    keys: int
    heads: int
    rows: int = 1

    @property
    def title(self) -> str:
        return f"bf16 {COLUMNS}/{VALUES} B{self.batch} S{self.keys // 1024}k H{self.heads}, {self.rows} rows"

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.keys * COLUMNS

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.rows * self.heads * self.keys * (COLUMNS + VALUES)


CELLS = (
    Latent(64, 4096, 128), Latent(16, 8192, 128), Latent(1, 8192, 128), Latent(64, 4096, 16), Latent(16, 8192, 16),
    Latent(1, 65536, 16), Latent(64, 4096, 16, rows=4),
)  # fmt: skip


def by_torch(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The products as torch's library computes them, all heads and rows of a sequence in one matrix."""
    rows, keys = q.flatten(1, 2), k[:, 0]
    weights = torch.softmax(rows @ keys.transpose(1, 2) * COLUMNS**-0.5, dim=-1)
    return (weights @ keys[..., :VALUES]).view(*q.shape[:3], VALUES)


def rows(rounds: int) -> Iterator[Row]:
    rate = read_rate()
    spec = attngen.define(name="latent", dtype="bf16", head_dim=COLUMNS, values=(0, VALUES))
    paged = attngen.define(name="latent", dtype="bf16", head_dim=COLUMNS, values=(0, VALUES), storage="paged", page_size=PAGE)
    compiled = torch.compile(by_torch, dynamic=False)
    for cell in CELLS:
        count = min(max(-(-COLD_BYTES // cell.bytes), 1), MOST_CALLS)
        randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        given = [
            (randn(cell.batch, cell.heads, cell.rows, COLUMNS), randn(cell.batch, 1, cell.keys, COLUMNS)) for _ in range(count)
        ]
        table = torch.randperm(cell.batch * cell.keys // PAGE, device="cuda").int().view(cell.batch, -1)
        where = {"page_table": table, "seqused": torch.full((cell.batch,), cell.keys, device="cuda", dtype=torch.int32)}
        pool = attngen.compile(paged, device="cuda")
        sides: dict[str, list[Call]] = {
            ATTNGEN: [partial(attngen.compile(spec, device="cuda"), *one) for one in given],
            PAGES: [partial(pool, q, k.view(-1, 1, PAGE, COLUMNS), **where) for q, k in given],
            TORCH: [partial(compiled, *one) for one in given],
        }
        us = {name: 1e3 * t for name, t in in_graphs(sides, rounds).medians().items()}
        q, k = (t[:1] for t in given[0])
        exact, _ = torch_attention(spec, q, k, k[..., :VALUES])
        errors = {n: float((sides[n][0]()[:1].double() - exact).abs().max()) for n in (ATTNGEN, TORCH)}
        yield {"case": cell.title, "us": us, "bytes": cell.bytes, "operations": cell.operations, "errors": errors, "rate": rate}
        del given, sides
        torch.cuda.empty_cache()


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        us = r["us"]
        cells = (f"{t:.1f} ({r['bytes'] / (t * 1e6):.2f}, {r['operations'] / (t * 1e6):.0f})" for t in us.values())
        lines.append((r["case"], *cells, *(f"{e:.0e}" for e in r["errors"].values())))
    columns = ("us (TB/s, TFLOP/s)", ATTNGEN, PAGES, TORCH, "error", "torch's")
    goal = f"B64 S4k: {MANY:.0f} TFLOP/s of 128 heads, {FEW} TB/s of 16"
    return f"{markdown(columns, lines)}\n\nRead rate {rows[0]['rate']:.2f} TB/s. Goal: {goal}."
