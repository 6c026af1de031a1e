"""Plain attention beside torch's backends, FlexAttention, and FlashAttention's packages where they are installed."""

from __future__ import annotations

from collections.abc import Iterator

from cell import Row
from words import markdown

import attngen
from attngen.bench.peers import flash_peers, torch_peers
from decode_parts import Cache, attngen_calls, flex_calls, in_graphs, read_rate

PEERS = ("torch cuDNN", "torch flash")
CELLS = (Cache(1, 8192), Cache(1, 65536), Cache(16, 8192), Cache(64, 8192))
SHARE, MICROSECONDS, LONG = 0.95, 15.0, 3.6 / 4.34  # goals: share of the read rate, many sequences; B1 S8k; share, B1 S64k


def rows(rounds: int) -> Iterator[Row]:
    rate = read_rate()
    for cell in CELLS:
        yield beside(cell, rounds) | {"read_rate": rate}


def beside(cell: Cache, rounds: int) -> Row:
    """Microseconds and TB/s of each side."""
    spec = attngen.define(name="plain", dtype=cell.dtype, head_dim=cell.head_dim)
    tensors = cell.tensors()
    sides = {"attngen": attngen_calls(spec, tensors, {})}
    for peer in PEERS:
        calls = [torch_peers(spec, *one, only=[peer]) for one in tensors]
        if all(calls):
            sides[peer] = [call[peer] for call in calls]
    flash = [flash_peers(spec, *one) for one in tensors]
    sides |= {peer: [calls[peer] for calls in flash] for peer in flash[0]}
    if flex := flex_calls(spec, tensors, {}):
        sides["FlexAttention"] = flex
    us = {name: 1e3 * t for name, t in in_graphs(sides, rounds).medians().items()}
    moved = cell.bytes_of(cell.keys)
    return {"case": cell.title, "us": us, "tb_s": {name: moved / (t * 1e6) for name, t in us.items()}}


def table(rows: list[Row]) -> str:
    sides = list(dict.fromkeys(side for r in rows for side in r["us"]))
    lines = []
    for r in rows:
        cells = (f"{r['us'][s]:.1f} ({r['tb_s'][s]:.2f})" if s in r["us"] else "-" for s in sides)
        lines.append((r["case"], *cells, f"{r['tb_s']['attngen'] / r['read_rate']:.1%}"))
    text = markdown(("us (TB/s)", *sides, "attngen, of the read rate"), lines)
    goal = f"B1 S8k {MICROSECONDS:.0f} us, B1 S64k {LONG:.0%} of the read rate, B16 and B64 {SHARE:.0%}"
    return f"{text}\n\nRead rate {rows[0]['read_rate']:.2f} TB/s. Goal: {goal}."
