"""The generator's state of a call with dropout: torch's own generator draws it, on the device, unless the call says a seed.

A draw is an operation of torch: torch.compile traces it, a CUDA graph repeats it at each replay with other numbers, and
torch.utils.checkpoint, which restores the generator, draws the same again.
"""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from attngen.device.params import signed
from attngen.sdpa import check_dropout
from attngen.spec.dropout import STEPS


def generator_state(device: torch.device, seed: int | None = None, offset: int = 0) -> Tensor:
    """int64 [2], seed and offset of the weights that are dropped: those given, or of torch's generator of `device`.

    Raises ArgumentError for a number of more than 64 bits.
    """
    if seed is None:
        return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    numbers = (
        torch.full((1,), signed(name, n), dtype=torch.int64, device=device) for name, n in (("seed", seed), ("offset", offset))
    )
    return torch.cat(tuple(numbers))


def share_of(dropout_p: float) -> float:
    """`dropout_p` in 256ths, as kernels have it, as a plain number: torch.compile recompiles for another."""
    if dropout_p == 0:
        return 0.0
    check_dropout(dropout_p)
    return min(max(index(int(dropout_p * STEPS + 0.5)), 1), STEPS - 1) / STEPS
