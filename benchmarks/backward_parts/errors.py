"""The largest and the root mean square errors of dQ, dK and dV against float64, beside cuDNN's on the same inputs.

The largest error of one draw is often the last rounding of one of its few largest elements: it is chance which side has it.
What is compared is therefore the mean, over draws, of the largest error of a draw. The largest one of all draws stands beside
it, and the root mean square of all errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import torch
from cell import CUDNN, Cell, Row
from hopper_parts.errors import largest
from words import Mark, markdown, most, worst

from backward_parts import beside_torch
from backward_parts.latent import CELLS as LATENT
from backward_parts.plain import CELLS

TIMES_CUDNN = 1.25
DRAWS = 32
GRADIENTS = ("dQ", "dK", "dV")
SIDES = ("attngen", CUDNN)


def rows(rounds: int) -> Iterator[Row]:
    """Of DRAWS draws of two heads: the largest error of a single draw varies by a factor of 1.5, on both sides."""
    for cell in (c for c in [*CELLS, *LATENT] if c.q_len <= 4096):
        draws = [errors_of(cell) for _ in range(DRAWS)]
        for number, title in enumerate(GRADIENTS):
            errors = {side: [draw[side][number][0] for draw in draws] for side in SIDES}
            means = {side: fmean(errors[side]) for side in SIDES}
            rms = {side: fmean(draw[side][number][1] for draw in draws) ** 0.5 for side in SIDES}
            yield {
                "case": f"{cell.title}, {title}",
                "errors": means,
                "ratio": means["attngen"] / means[CUDNN],
                "ratio of all": max(errors["attngen"]) / max(errors[CUDNN]),
                "rms": rms,
                "ratio of rms": rms["attngen"] / rms[CUDNN],
            }


def errors_of(cell: Cell) -> dict[str, list[tuple[float, float]]]:
    """(the largest error, the mean square error) of each gradient of each side, of one draw."""
    tensors = replace(cell, batch=1, heads=2).randn()
    calls = beside_torch(cell, tensors, None, [CUDNN])
    gradient = next(iter(calls.values())).args[2]  # type: ignore[attr-defined]
    truth = in_float64(tensors, gradient, cell.mask == "causal")
    found = {side: list(zip(call(), truth, strict=True)) for side, call in calls.items()}
    return {side: [(largest(g, t), float((g.double() - t).square().mean())) for g, t in pairs] for side, pairs in found.items()}


def in_float64(tensors: tuple[torch.Tensor, ...], gradient: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    """The gradients by torch's autograd."""
    q, k, v = (t.double().requires_grad_() for t in tensors)
    with torch.enable_grad():
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), gradient.double())


def table(rows: list[Row]) -> str:
    ratios = ("ratio", "ratio of all", "ratio of rms")
    lines = ((r["case"], *(f"{r['errors'][side]:.1e}" for side in SIDES), *(f"{r[name]:.3f}" for name in ratios)) for r in rows)
    titles = (f"largest error of a draw, mean of {DRAWS}", "attngen", "cuDNN", "ratio")
    text = markdown((*titles, "ratio of the largest of all draws", "ratio of root mean squares"), lines)
    return f"{text}\n\nGoal: at most {TIMES_CUDNN} of cuDNN's. Measured: {most(rows, lambda r: r['ratio'])}."


def marks(rows: list[Row]) -> list[Mark]:
    return [worst("largest error, of cuDNN's", rows, lambda r: r["ratio"], TIMES_CUDNN, at_most=True)]
