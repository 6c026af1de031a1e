"""The variants that FlexAttention is used for, beside it, and beside the kernel's own rate without the variant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cell import Row, rates
from words import markdown

import attngen
from attngen.bench.measure import measure_bursts
from attngen.bench.peers import flex_peer
from attngen.reference.torch_oracle import allowed_pairs

IDS = {"ids": ("int32", ("batch", "kv_len"))}
# name: (keywords of attngen.define, the captured tensor)
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, ""),
    "causal": ({"mask": "causal"}, ""),
    "ALiBi": ({"mask": "causal", "score": "alibi(slopes)", "inputs": {"slopes": ("fp32", ("heads",))}}, "slopes"),
    "s + (q - k)": ({"score": "s + (q - k)"}, ""),
    "soft-cap 20": ({"mask": "causal", "score": "softcap(20.0)"}, ""),
    "soft-cap 20, precision high": ({"mask": "causal", "score": "softcap(20.0)", "precision": "high"}, ""),
    "window 1024": ({"mask": "causal and window(1024)"}, ""),
    "documents of 1024": ({"mask": "same_document(ids)", "inputs": IDS}, "ids"),
    "causal documents of 1024": ({"mask": "causal and same_document(ids)", "inputs": IDS}, "ids"),
    "prefix 1024": ({"mask": "prefix(1024) or causal"}, ""),
    "every 4th key": ({"mask": "causal and dilated(step)", "params": {"step": 4}}, ""),
    "every 4th block of 128": (
        {"mask": "causal and (q // side - k // side) % every == 0", "params": {"side": 128, "every": 4}},
        "",
    ),
    "relative bias": ({"score": "relative_bias(table, 1024)", "inputs": {"table": ("fp32", ("heads", 2049))}}, "table"),
}


def plain(name: str) -> str:
    """The variant without what makes it one: causal where its mask is, else full."""
    return "causal" if "causal" in VARIANTS[name][0].get("mask", "") else "full"


def captured(name: str) -> dict[str, torch.Tensor]:
    """The tensor that a variant reads, for B2 H16 S8192."""
    if name == "slopes":
        return {name: 2.0 ** (-0.5 * torch.arange(1, 17, device="cuda"))}
    if name == "ids":
        return {name: (torch.arange(8192, dtype=torch.int32, device="cuda") // 1024).expand(2, 8192).contiguous()}
    if name == "bias":
        return {name: torch.randn(2, 16, 8192, 8192, dtype=torch.bfloat16, device="cuda")}
    return {name: torch.randn(16, 2049, device="cuda")} if name else {}


def rows(rounds: int, kernel: str = "fused") -> Iterator[Row]:
    """One variant after the other, each in the same rounds as the kernel without it: `share` is of that rate."""
    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda").bfloat16() for _ in range(3))
    found_plain: dict[str, tuple[Any, int]] = {}  # the call and its operations
    for name, (keywords, reads) in VARIANTS.items():
        spec = attngen.define(name="variant", dtype="bf16", head_dim=128, **keywords)
        inputs = captured(reads)
        ours = partial(attngen.compile(spec, kernel=kernel, device="cuda", captures=inputs), q, k, v)
        operations = 4 * 128 * allowed_pairs(spec, q, k, inputs)
        base, base_operations = found_plain.setdefault(plain(name), (ours, operations))
        calls = {"attngen": ours, "plain": base, **flex_peer(spec, q, k, v, inputs, {}, print)}
        difference = float((ours().float() - calls["FlexAttention"]().float()).abs().max())
        found = measure_bursts(calls, rounds)
        ms = found.medians()
        yield {
            "case": name,
            "ms": ms,
            "tflops": rates(operations, {c: ms[c] for c in ("attngen", "FlexAttention")}),
            "share": found.ratio("attngen", "plain") * operations / base_operations,
            "ratio": found.ratio("attngen", "FlexAttention"),
            "difference": difference,
        }


def table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        t = r["tflops"]
        lines.append((r["case"], f"{t['attngen']:.0f}", f"{r['share']:.0%}", f"{t['FlexAttention']:.0f}", f"{r['ratio']:.2f}"))
    titles = ("TFLOP/s, B2 H16 S8192 D128 bf16", "attngen", "of its own plain rate", "FlexAttention", "ratio")
    return markdown(titles, lines)
