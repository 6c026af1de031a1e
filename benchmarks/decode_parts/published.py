"""Times that others have published of libraries which are not measured here, beside attngen's at the same sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from cell import Row
from words import markdown

import attngen
from attngen.bench.peers import torch_peers
from decode_parts import Cache, Call, attngen_calls, in_graphs
from decode_parts.paged import paged_calls

CUDNN = "torch cuDNN"


@dataclass(frozen=True, slots=True)
class Published:
    """Microseconds of libraries with keys in pages of `page` rows, on `gpu`, as `source` has them."""

    cell: Cache
    page: int
    us: dict[str, float]
    gpu: str
    source: str

    @property
    def title(self) -> str:
        c = self.cell
        return f"{c.heads} heads over {c.kv_heads}, {c.dtype} D{c.head_dim} B{c.batch}, {c.keys} keys, pages of {self.page}"


PUBLISHED = (
    Published(
        Cache(1, 8192, heads=64), 32, {"FlashInfer (fa2)": 35, "cuDNN": 20}, "H200",
        "https://github.com/flashinfer-ai/flashinfer/pull/2055",
    ),
    Published(
        Cache(16, 2000, heads=32, kv_heads=32), 8, {"FlashAttention-3": 292.0}, "H100",
        "https://github.com/Dao-AILab/flash-attention/issues/1572",
    ),
)  # fmt: skip


def rows(rounds: int) -> Iterator[Row]:
    for one in PUBLISHED:
        spec = attngen.define(name="plain", dtype=one.cell.dtype, head_dim=one.cell.head_dim)
        tensors = one.cell.tensors()
        sides: dict[str, Sequence[Call]] = {"dense": attngen_calls(spec, tensors, {})}
        sides["pages"] = paged_calls(one.cell, tensors, one.page, True, one.page % 16 == 0, False)
        calls = [torch_peers(spec, *each, only=[CUDNN]) for each in tensors]
        if all(calls):
            sides[CUDNN] = [call[CUDNN] for call in calls]
        us = {name: 1e3 * t for name, t in in_graphs(sides, rounds).medians().items()}
        yield {"case": one.title, "us": us, "published": one.us, "gpu": one.gpu, "source": one.source}
        del tensors, sides, calls
        torch.cuda.empty_cache()


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        measured = (f"{r['us'][side]:.1f}" if side in r["us"] else "-" for side in ("pages", "dense", CUDNN))
        published = ", ".join(f"{name} {us:g}" for name, us in r["published"].items())
        lines.append((r["case"], *measured, f"{published}, [on an {r['gpu']}]({r['source']})"))
    return markdown(("us", "attngen", "attngen, dense", f"{CUDNN}, dense", "published, pages"), lines)
