"""Variants of attention, each as a share of the plain one's rate: by the keys that it has to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from cell import Row
from words import markdown

import attngen
from decode_parts import Cache, attngen_calls, in_graphs

CELL = Cache(16, 8192)
SHARE = 0.85
WINDOW = 4096
PLAIN = "plain"

# keywords of `define`, changes of CELL, the shapes of captured tensors, keys that the mask keeps
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], Mapping[str, tuple[int, ...]], int]] = {
    PLAIN: ({}, {}, {}, CELL.keys),
    "soft-cap 20": ({"score": "softcap(20)"}, {}, {}, CELL.keys),
    "ALiBi": ({"score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}}, {}, {"slopes": (32,)}, CELL.keys),
    "window of 4096 of 64k": (
        {"mask": f"causal_bottom_right and q + kv_len - q_len - k < {WINDOW}"}, {"keys": 65536}, {}, WINDOW,
    ),
    "sink": ({"sink": "sinks[h]", "inputs": {"sinks": ("fp32", ("heads",))}}, {}, {"sinks": (32,)}, CELL.keys),
    "documents": (
        {"mask": "ids[b, k] == ids[b, kv_len - 1]", "inputs": {"ids": ("int32", ("batch", "kv_len"))}}, {},
        {"ids": (16, 8192)}, CELL.keys,
    ),
    "4 rows": ({"mask": "causal_bottom_right"}, {"rows": 4}, {}, CELL.keys),
    "D64": ({"head_dim": 64}, {"head_dim": 64}, {}, CELL.keys),
    "D256": ({"head_dim": 256}, {"head_dim": 256}, {}, CELL.keys),
    "fp32": ({"dtype": "fp32"}, {"dtype": "fp32"}, {}, CELL.keys),
}  # fmt: skip


def rows(rounds: int) -> Iterator[Row]:
    plain = 0.0
    for name, (keywords, changes, shapes, kept) in VARIANTS.items():
        cell = replace(CELL, **changes)
        spec = attngen.define(**{"name": "variant", "dtype": cell.dtype, "head_dim": cell.head_dim, **keywords})
        tensors = cell.tensors()
        us = 1e3 * in_graphs({"attngen": attngen_calls(spec, tensors, captured(shapes))}, rounds).medians()["attngen"]
        tb_s = cell.bytes_of(kept) / (us * 1e6)
        plain = plain or tb_s
        yield {"case": name, "us": us, "tb_s": tb_s, "share": tb_s / plain}
        del tensors
        torch.cuda.empty_cache()


def captured(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The captured tensors of a variant."""
    zeros = {n: torch.zeros(s, device="cuda", dtype=torch.int32) for n, s in shapes.items() if n == "ids"}
    return zeros | {n: torch.rand(s, device="cuda") for n, s in shapes.items() if n != "ids"}


def table(rows: list[Row]) -> str:
    lines = ((r["case"], f"{r['us']:.1f}", f"{r['tb_s']:.2f}", f"{r['share']:.1%}") for r in rows)
    text = markdown((CELL.title, "us", "TB/s", "of the plain one's rate"), lines)
    return f"{text}\n\nGoal: each at least {SHARE:.0%} of the plain one's rate."
