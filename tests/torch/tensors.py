"""Tensors of torch for tests: random ones, and their comparison."""

from __future__ import annotations

import torch

BACKEND = "aot_eager"  # traces and functionalizes as the default does, and leaves code generation out


def randn(*shape: int, dtype=torch.float16) -> torch.Tensor:
    """Normal numbers, the same for the same shape in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    """Fails if the shapes differ, or an element by `tolerance` or more."""
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).abs().max()) < tolerance
