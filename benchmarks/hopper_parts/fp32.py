"""fp32 by hopper, of three terms of bf16 for each number, beside the portable kernel and torch's efficient backend.

Times have the kernels that split Q, K and V. Errors are the largest of the first head against float64; torch's math backend
in fp32 says what fp32 has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from cell import Row, rates, square
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from words import Mark, geometric_mean, least, markdown, worst

import attngen
from attngen.bench.measure import measure_bursts

HOPPER, FUSED, EFFICIENT, MATH = "hopper", "fused", "efficient", "math"
GOALS = {None: 100.0, "causal": 95.0}  # TFLOP/s at GOAL_LENGTH rows
GOAL_LENGTH = 4096
LENGTHS = (GOAL_LENGTH, 128, 256, 512, 1024, 16384)
CELLS = [square("fp32", d, mask, length) for length in LENGTHS for d in (64, 128) for mask in GOALS]


def by_torch(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def rows(rounds: int) -> Iterator[Row]:
    torch.backends.cuda.matmul.allow_tf32 = False
    for cell in CELLS:
        q, k, v = cell.randn()
        causal = cell.mask is not None
        efficient = partial(by_torch, SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal)
        calls = {
            **{name: partial(attngen.compile(cell.spec, kernel=name, device="cuda"), q, k, v) for name in (HOPPER, FUSED)},
            EFFICIENT: efficient,
        }
        first = [t[:1, :1] for t in (q, k, v)]
        exact = by_torch(SDPBackend.MATH, *(t.double() for t in first), causal)
        results = {name: call()[:1, :1] for name, call in calls.items()} | {MATH: by_torch(SDPBackend.MATH, *first, causal)}
        found = measure_bursts(calls, rounds)
        yield {
            "case": cell.title.removeprefix("fp32 "),
            "goal": GOALS[cell.mask] if cell.q_len == GOAL_LENGTH else None,
            "tflops": rates(cell.operations((q, k, v)), found.medians()),
            "ratio": found.ratio(HOPPER, FUSED),
            "errors": {name: float((o.double() - exact).abs().max()) for name, o in results.items()},
        }


def table(rows: list[Row]) -> str:
    timed, measured = (HOPPER, FUSED, EFFICIENT), (HOPPER, FUSED, EFFICIENT, MATH)
    heading = ("TFLOP/s", *timed, "of fused", *(f"error, {name}" for name in measured))
    lines = [
        (
            r["case"],
            *(f"{r['tflops'][name]:.0f}" for name in timed),
            f"{r['ratio']:.2f}",
            *(f"{r['errors'][name]:.1e}" for name in measured),
        )
        for r in rows
    ]
    mean, lowest = geometric_mean([r["ratio"] for r in rows]), least(rows, lambda r: r["ratio"])
    return f"{markdown(heading, lines)}\n\nRatio to fused: geometric mean {mean:.2f}, least {lowest}."


def marks(rows: list[Row]) -> list[Mark]:
    def of_goal(goal: float) -> Mark:
        return worst(
            f"fp32, of {goal:.0f} TFLOP/s", [r for r in rows if r["goal"] == goal], lambda r: r["tflops"][HOPPER], goal
        )

    errors = worst(
        "fp32's largest error, of math's", rows, lambda r: r["errors"][HOPPER] / r["errors"][MATH], 1.0, at_most=True
    )
    return [*map(of_goal, GOALS.values()), errors]
