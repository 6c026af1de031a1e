"""Q, K and V of 8 bits (e4m3), multiplied as they are, beside the same numbers in bf16. torch has no attention of 8 bits.

Errors are against float64 of the stored numbers, which bf16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from cell import Cell, Row, rates, square
from words import geometric_mean, least, markdown

import attngen
from attngen.bench.measure import measure_bursts
from attngen.reference.torch_oracle import torch_attention

BYTES = {"q": "fp8_e4m3", "k": "fp8_e4m3", "v": "fp8_e4m3", "o": "bf16"}
NARROW, WIDE = "8 bits", "bf16"
MARKS = {128: 1050.0, 256: 1150.0}  # TFLOP/s at 16384 rows, by head size: of cuDNN, and of FlashAttention-3 on an H100
LENGTH = 16384
CELLS = [
    *(square("bf16", d, mask, LENGTH) for d in (64, 128, 256) for mask in (None, "causal")),
    *(square("bf16", d, mask, 4096) for d in (64, 128, 256) for mask in (None, "causal")),
    *(Cell("bf16", 128, mask, 2, 32, 8192, 8192, 8) for mask in (None, "causal")),
]


def rows(rounds: int) -> Iterator[Row]:
    for cell in CELLS:
        narrow = [t.to(torch.float8_e4m3fn) for t in cell.randn()]
        q, k, v = (t.to(torch.bfloat16) for t in narrow)
        spec = attngen.define(dtype=BYTES, head_dim=cell.head_dim, mask=cell.mask)
        calls = {
            NARROW: partial(attngen.compile(spec, kernel="hopper", device="cuda"), *narrow),
            WIDE: partial(attngen.compile(cell.spec, kernel="hopper", device="cuda"), q, k, v),
        }
        exact, _ = torch_attention(spec, *(t[:1, :1] for t in narrow))
        errors = {name: float((call()[:1, :1].double() - exact).abs().max()) for name, call in calls.items()}
        found = measure_bursts(calls, rounds)
        yield {
            "case": cell.title.removeprefix("bf16 "),
            "tflops": rates(cell.operations((q, k, v)), found.medians()),
            "ratio": found.ratio(NARROW, WIDE),
            "mark": MARKS.get(cell.head_dim) if cell.q_len == LENGTH else None,
            "errors": errors,
            "largest": float(exact.abs().max()),
        }


def table(rows: list[Row]) -> str:
    heading = ("TFLOP/s", NARROW, WIDE, "ratio", f"error, {NARROW}", f"error, {WIDE}", "largest of O")
    lines = [
        (
            r["case"],
            *(f"{r['tflops'][name]:.0f}" for name in (NARROW, WIDE)),
            f"{r['ratio']:.2f}",
            *(f"{r['errors'][name]:.1e}" for name in (NARROW, WIDE)),
            f"{r['largest']:.1e}",
        )
        for r in rows
    ]
    mean, lowest = geometric_mean([r["ratio"] for r in rows]), least(rows, lambda r: r["ratio"])
    seen = [f"{r['case']} {r['tflops'][NARROW]:.0f} of {r['mark']:.0f}" for r in rows if r["mark"]]
    goals = f"Goal, as published of others: {'; '.join(seen)}." if seen else ""
    return f"{markdown(heading, lines)}\n\n{goals} Ratio to bf16: geometric mean {mean:.2f}, least {lowest}."
