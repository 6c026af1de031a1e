"""What flash-attention's functions mean, by torch's own operations, and the grid of cases that its own tests walk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

Tensor = torch.Tensor
LENGTHS = ((113, 203), (128, 217), (108, 256), (256, 128), (200, 7), (1, 147), (3, 799))
HEADS = ((6, 6), (6, 1), (6, 2))
SIZES = (32, 40, 59, 64, 96, 111, 128, 192, 256)


@dataclass(frozen=True)
class Case:
    """Arguments of a call, without tensors. `slopes` is the number of dimensions of ALiBi's, or 0."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: int = 0
    softmax_scale: float | None = None

    def named(self, heads: int, batch: int, device: Any = None) -> dict[str, Any]:
        """The keywords of a call."""
        named = {
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "softmax_scale": self.softmax_scale,
        }
        if self.slopes:
            shape = (heads,) if self.slopes == 1 else (batch, heads)
            named["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(heads)).to(device) * 0.3
        return named


WINDOWS = ((-1, -1), (17, 5), (40, -1), (-1, 9), (0, 0))
CASES = tuple(
    Case(causal, window, softcap, slopes)
    for causal, window, softcap, slopes in product((False, True), WINDOWS, (0.0, 50.0), (0, 1, 2))
)


def grid() -> Iterator[tuple[Case, tuple[int, int], tuple[int, int], int]]:
    """Each case with lengths, heads and a head size: these take turns, so that each value meets several cases."""
    for i, case in enumerate(CASES):
        yield case, LENGTHS[i % len(LENGTHS)], HEADS[i % len(HEADS)], SIZES[i % len(SIZES)]
    yield replace(CASES[0], softmax_scale=0.3), (20, 30), (4, 2), 24


def allowed(case: Case, q_len: int, kv_len: int, device: Any = None) -> Tensor:
    """The pairs that take part, [q_len, kv_len]."""
    ahead = torch.arange(kv_len, device=device) - (torch.arange(q_len, device=device)[:, None] + kv_len - q_len)
    left, right = case.window_size
    right = 0 if case.causal else right
    pairs = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        pairs &= ahead >= -left
    if right >= 0:
        pairs &= ahead <= right
    return pairs


def reference(
    q: Tensor, k: Tensor, v: Tensor, case: Case, slopes: Tensor | None, precision: Any = None
) -> tuple[Tensor, Tensor]:
    """(O, lse) of [batch, length, heads, size], in float64 or in another precision throughout."""
    queries, keys, values = (t.to(precision or torch.float64).transpose(1, 2) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scale = q.shape[3] ** -0.5 if case.softmax_scale is None else case.softmax_scale
    scores = queries @ keys.mT * scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if slopes is not None:
        rows, columns = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
        distance = (rows[:, None] + k.shape[1] - q.shape[1] - columns).abs()
        scores = scores - (slopes[:, None, None] if slopes.dim() == 1 else slopes[:, :, None, None]).to(scores.dtype) * distance
    pairs = allowed(case, q.shape[1], k.shape[1], q.device)
    seen = pairs.any(1)[:, None]
    weights = torch.softmax(torch.where(pairs | ~seen, scores, float("-inf")), -1) * seen.to(scores.dtype)
    lse = torch.logsumexp(torch.where(pairs, scores, float("-inf")), -1)
    return (weights @ values).transpose(1, 2), lse


def results(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], precision: Any = None) -> list[Tensor]:
    """O of `function` and the gradients of a loss by all `tensors`, which are in `precision` if it is given."""
    leaves = [t.detach().to(precision or t.dtype).requires_grad_() for t in tensors]
    output = function(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def check(found: list[Tensor], expected: list[Tensor], usual: list[Tensor]) -> None:
    """Fails if an error exceeds what flash-attention's tests allow: twice that of torch's operations in the same precision for
    O, three times for gradients, and a step of the element type."""
    for i, (one, exact, low) in enumerate(zip(found, expected, usual, strict=True)):
        assert one.shape == exact.shape
        step = torch.finfo(one.dtype).eps * max(1.0, float(exact.abs().max())) if exact.numel() else 0.0
        error, of_low = (float((x.double() - exact.double()).abs().max()) if x.numel() else 0.0 for x in (one, low))
        assert error <= (3 if i else 2) * of_low + step, (i, error, of_low)
