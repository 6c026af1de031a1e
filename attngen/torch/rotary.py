"""`rotary_tables`: the cosines and sines that rotary embeddings read."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.device.arrays import ArgumentError
from attngen.spec.rotary import ROTARY_MULTIPLE


def rotary_tables(
    positions: int,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(cosines, sines), each [positions, rotary_dim / 2], for a spec's `rotary` and for `flash_attn_with_kvcache`.

    Pair n is rotated by the angle position / base^(2 n / rotary_dim) (Su et al. 2021), computed in fp64. A model that scales
    its angles for long contexts makes tables of its own. Raises ArgumentError.
    """
    for name, number, least in (("positions", positions, 0), ("rotary_dim", rotary_dim, ROTARY_MULTIPLE)):
        if not isinstance(number, int) or number < least:
            raise ArgumentError(f"`{name}` is {number!r}; expected an int, at least {least}")
    if rotary_dim % ROTARY_MULTIPLE:
        raise ArgumentError(f"`rotary_dim` is {rotary_dim}; expected a multiple of {ROTARY_MULTIPLE}")
    if not isinstance(base, (int, float)) or not 0 < base < float("inf"):
        raise ArgumentError(f"`base` is {base!r}; expected a number above 0")
    if not dtype.is_floating_point:
        raise ArgumentError(f"`dtype` is {dtype}; expected one of floats")
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)
    places = torch.arange(positions, dtype=torch.float64, device=device)
    angles = places[:, None] / base ** (2 * pairs / rotary_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)
