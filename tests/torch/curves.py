"""Loss curves of a small GPT on data that only attention can learn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from tests.torch.gpt import Gpt

PERIOD, SYMBOLS = 3, 16


def tokens(batch: int, length: int, seed: int, device: str) -> torch.Tensor:
    """Rows that repeat PERIOD random symbols: from the token alone, the next one is a guess among SYMBOLS."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(SYMBOLS, (batch, PERIOD), generator=made).repeat(1, -(-length // PERIOD))[:, :length].to(device)


def loss_curve(
    attend: Callable[..., torch.Tensor],
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    batch: int = 4,
    length: int = 16,
    **sizes: int,
) -> torch.Tensor:
    """The loss of each of `steps` steps, each on rows of its own."""
    torch.manual_seed(0)
    model = Gpt(attend, **sizes).to(device, dtype)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(steps):
        rows = tokens(batch, length + 1, step, device)
        with torch.autocast(device, autocast) if autocast else nullcontext():
            logits = model(rows[:, :-1])
        known = slice(PERIOD - 1, None)  # what comes next in the first period cannot be known
        loss = torch.nn.functional.cross_entropy(logits[:, known].flatten(0, 1).to(dtype), rows[:, 1:][:, known].flatten())
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(losses).double().cpu()


def difference(curve: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest of all steps. What a rounding error does to a curve grows where the loss falls fastest, and with the kind of
    numbers, so the limit is what the same model with torch's attention has, twice."""
    return float((curve - exact).abs().max())
