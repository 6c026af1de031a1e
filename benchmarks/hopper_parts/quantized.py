"""Prompts over keys and values of 8 bits, with queries of 16, beside the same with K and V of 16 bits; 32 heads over 8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from cell import Cell, Row, rates
from words import geometric_mean, least, markdown

import attngen
from attngen.bench.measure import measure_bursts
from attngen.reference.torch_oracle import torch_attention

SHARE = 0.95  # share of 16 bits' rate
WIDE, PLAIN, SCALED = "16 bits", "8 bits", "8 bits, scales"
CELLS = [
    Cell(dtype, head_dim, mask, 2, 32, length, length, 8)
    for dtype, head_dim in (("bf16", 128), ("fp16", 128), ("bf16", 64))
    for mask in (None, "causal")
    for length in (2048, 8192)
]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        q, k, v = cell.randn()
        narrow = [t.to(torch.float8_e4m3fn) for t in (k, v)]
        types = {"q": cell.dtype, "k": "fp8_e4m3", "v": "fp8_e4m3"}
        scales = {n: torch.rand(8, device="cuda") + 0.5 for n in ("k_scales", "v_scales")}
        keywords = {"head_dim": cell.head_dim, "mask": cell.mask, "dtype": types}
        plain = attngen.define(**keywords)
        scaled = attngen.define(
            **keywords,
            k_scale="k_scales[h // 4]",
            v_scale="v_scales[h // 4]",
            inputs=dict.fromkeys(scales, ("fp32", ("heads_kv",))),
        )
        compiled = {
            name: attngen.compile(spec, kernel="hopper", device="cuda")
            for name, spec in ((WIDE, replace(plain, k_dtype=None, v_dtype=None)), (PLAIN, plain), (SCALED, scaled))
        }
        calls = {
            WIDE: partial(compiled[WIDE], q, k, v),
            PLAIN: partial(compiled[PLAIN], q, *narrow),
            SCALED: partial(compiled[SCALED], q, *narrow, **scales),
        }
        exact, _ = torch_attention(plain, *(t[:1, :1] for t in (q, *narrow)))
        error = float((calls[PLAIN]()[:1, :1].double() - exact).abs().max())
        found = measure_bursts(calls, rounds)
        yield {
            "case": cell.title,
            "tflops": rates(cell.operations((q, k, v)), found.medians()),
            "ratio": min(found.ratio(name, WIDE) for name in (PLAIN, SCALED)),
            "error": error,
        }


def table(rows: list[Row]) -> str:
    lines = [
        (r["case"], *(f"{r['tflops'][s]:.0f}" for s in (WIDE, PLAIN, SCALED)), f"{r['ratio']:.3f}", f"{r['error']:.1e}")
        for r in rows
    ]
    mean = geometric_mean([r["ratio"] for r in rows])
    text = markdown(("TFLOP/s", WIDE, PLAIN, SCALED, "ratio, the lesser", "error, 8 bits"), lines)
    lowest = least(rows, lambda r: r["ratio"])
    return f"{text}\n\nGoal: {SHARE:.2f} of 16 bits. Measured: geometric mean {mean:.3f}, least {lowest}."
