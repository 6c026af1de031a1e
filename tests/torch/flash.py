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
    chunk: int = 0

    def named(self, heads: int, batch: int, device: Any = None) -> dict[str, Any]:
        """The keywords of a call."""
        named = {
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "softmax_scale": self.softmax_scale,
        }
        if self.chunk:
            named["attention_chunk"] = self.chunk
        if self.slopes:
            shape = (heads,) if self.slopes == 1 else (batch, heads)
            named["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(heads)).to(device) * 0.3
        return named


WINDOWS = ((-1, -1), (17, 5), (40, -1), (-1, 9), (0, 0))
CASES = tuple(
    Case(causal, window, softcap, slopes)
    for causal, window, softcap, slopes in product((False, True), WINDOWS, (0.0, 50.0), (0, 1, 2))
)


def grid(shorter: int = 1) -> Iterator[tuple[Case, tuple[int, int], tuple[int, int], int]]:
    """Each case with lengths, heads and a head size, which take turns, so that each value meets several cases. Lengths and
    windows are divided by `shorter`."""
    for i, case in enumerate(CASES):
        q_len, kv_len = LENGTHS[i % len(LENGTHS)]
        lengths = -(-q_len // shorter), -(-kv_len // shorter)
        left, right = (n if n < 0 else n // shorter for n in case.window_size)
        yield replace(case, window_size=(left, right)), lengths, HEADS[i % len(HEADS)], SIZES[i % len(SIZES)]
    yield replace(CASES[0], softmax_scale=0.3), (20, 30), (4, 2), 24


def allowed(case: Case, q_len: int, kv_len: int, device: Any = None) -> Tensor:
    """The pairs that take part, [q_len, kv_len]."""
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    ahead = torch.arange(kv_len, device=device) - position
    left, right = case.window_size
    right = 0 if case.causal else right
    pairs = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        pairs &= ahead >= -left
    if right >= 0:
        pairs &= ahead <= right
    if case.chunk:
        begin = position - position % case.chunk
        pairs &= (ahead + position >= begin) & (ahead + position < begin + case.chunk)
    return pairs


def reference(
    q: Tensor, k: Tensor, v: Tensor, case: Case, slopes: Tensor | None, precision: Any = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(O, lse) of [batch, length, heads, size], in float64 or in another precision throughout. `sinks` [heads] are one more
    logit of each row, without a value."""
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
    if sinks is not None:
        scores = torch.where(pairs, scores, float("-inf"))
        logits = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], -1)
        lse = torch.logsumexp(logits, -1)
        return ((scores - lse[..., None]).exp() @ values).transpose(1, 2), lse
    seen = pairs.any(1)[:, None]
    weights = torch.softmax(torch.where(pairs | ~seen, scores, float("-inf")), -1) * seen.to(scores.dtype)
    lse = torch.logsumexp(torch.where(pairs, scores, float("-inf")), -1)
    return (weights @ values).transpose(1, 2), lse


@dataclass(frozen=True)
class Batch:
    """Sequences of several lengths: (rows, keys) of each."""

    lengths: tuple[tuple[int, int], ...]

    def begins(self, which: int, device: Any = None) -> Tensor:
        """cu_seqlens of rows (0) or keys (1)."""
        ends = torch.tensor([0, *(pair[which] for pair in self.lengths)]).cumsum(0)
        return ends.to(device, torch.int32)

    def tensors(self, q_heads: int, kv_heads: int, size: int, dtype: Any, device: Any = None, rest: int = 0) -> list[Tensor]:
        """q, k and v of all sequences, and `rest` more rows and keys of NaN, which belong to none."""
        made = []
        for i, (which, heads) in enumerate(((0, q_heads), (1, kv_heads), (1, kv_heads))):
            total = sum(pair[which] for pair in self.lengths)
            rows = torch.randn((total, heads, size), generator=torch.Generator().manual_seed(i))
            made.append(torch.cat([rows, torch.full((rest, heads, size), float("nan"))]).to(device, dtype))
        return made

    def named(self, device: Any = None) -> dict[str, Any]:
        """The keywords of a call."""
        rows, keys = zip(*self.lengths, strict=True)
        return {
            "cu_seqlens_q": self.begins(0, device),
            "cu_seqlens_k": self.begins(1, device),
            "max_seqlen_q": max(rows),
            "max_seqlen_k": max(keys),
        }

    def reference(self, q: Tensor, k: Tensor, v: Tensor, case: Case, slopes: Tensor | None, precision: Any = None) -> Tensor:
        """O of all sequences, each by itself."""
        outputs = []
        rows, keys = self.begins(0).tolist(), self.begins(1).tolist()
        for i, (q_len, kv_len) in enumerate(self.lengths):
            of_rows, of_keys = slice(rows[i], rows[i] + q_len), slice(keys[i], keys[i] + kv_len)
            of_batch = slopes[i : i + 1] if slopes is not None and slopes.dim() == 2 else slopes
            outputs.append(reference(q[None, of_rows], k[None, of_keys], v[None, of_keys], case, of_batch, precision)[0][0])
        return torch.cat(outputs)


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
