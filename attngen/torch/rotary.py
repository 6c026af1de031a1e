"""`rotary_tables`: the cosines and sines that rotary embeddings read."""

from __future__ import annotations

from typing import Any

import torch

from attngen.device.arrays import ArgumentError
from attngen.spec.rotary import ROTARY_MULTIPLE

Tensor = Any


def rotary_tables(
    positions: int, rotary_dim: int, base: float = 10000.0, *, dtype: Any = torch.float32, device: Any = None
) -> tuple[Tensor, Tensor]:
    """(cosines, sines), each [positions, rotary_dim / 2], for a spec's `rotary` and for `flash_attn_with_kvcache`: those of the
    angles position / base^(2 n / rotary_dim) (Su et al. 2021), computed in fp64. A model that scales its angles makes tables
    of its own. Raises ArgumentError.
    """
    if rotary_dim <= 0 or rotary_dim % ROTARY_MULTIPLE:
        raise ArgumentError(f"`rotary_dim` is {rotary_dim}; expected a multiple of {ROTARY_MULTIPLE}")
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)
    places = torch.arange(positions, dtype=torch.float64, device=device)
    angles = places[:, None] / base ** (2 * pairs / rotary_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)
