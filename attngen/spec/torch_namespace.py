"""torch, as the array column of the operator table uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TorchNamespace:
    """torch's functions, whose widest float is `precision`, with literals that `fmax` and `fmin` know again.

    Where a variable equals a constant, the variable has the whole gradient, as of torch.clamp and in the derivative column;
    torch.maximum, which does not tell them apart, gives it a half. Of NaN and a number, the result is NaN, as of torch.maximum.
    """

    __name__ = "torch"

    def __init__(self, precision: torch.dtype, device: torch.device) -> None:
        import torch

        self._torch = torch
        self.float64 = self.precision = precision
        self._device = device
        self._literals: dict[str, tuple[Tensor, bool | int | float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def literal(self, value: bool | int | float) -> Tensor:
        """A constant of an expression."""
        key = repr(value)  # the numbers -0.0 and 0.0, or 1 and True, would be one key
        if key not in self._literals:
            self._literals[key] = self.number(value), value
        return self._literals[key][0]

    def number(self, value: Any) -> Tensor:
        """A number as a tensor without dimensions, made on the device: graph capture allows no copy from the host."""
        if isinstance(value, (bool, self._torch.SymBool)):
            dtype = self._torch.bool
        elif isinstance(value, (int, self._torch.SymInt)):
            dtype = self._torch.int64
        else:
            dtype = self.float64
        return self._torch.full((), value, dtype=dtype, device=self._device)

    def fmax(self, a: Tensor, b: Tensor) -> Tensor:
        for x, other in ((a, b), (b, a)):
            if (least := self._constant(other)) is not None:
                return self._torch.clamp(x, min=least)
        return self._torch.maximum(a, b)

    def fmin(self, a: Tensor, b: Tensor) -> Tensor:
        for x, other in ((a, b), (b, a)):
            if (most := self._constant(other)) is not None:
                return self._torch.clamp(x, max=most)
        return self._torch.minimum(a, b)

    def _constant(self, tensor: Tensor) -> bool | int | float | None:
        return next((value for made, value in self._literals.values() if made is tensor), None)
