"""`TensorMap`: the description of a tensor for TMA, before a device packs it into 128 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.device.arrays import ArgumentError
from attngen.spec.dtypes import DTYPES

MAX_RANK, MAX_BOX, MAX_SIZE, MAX_STRIDE = 5, 256, 2**32, 2**40
ALIGNMENT = 16  # bytes, of the address, of every stride, of a box's row
SWIZZLE_BYTES = 128


class TensorMapError(ArgumentError):
    """TMA cannot copy from this tensor as it lies in memory. The text names the tensor, the obstacle and the cure."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves. The innermost dimension, which has stride 1, comes first.
    Limits: CUDA driver API, cuTensorMapEncodeTiled. Raises TensorMapError if the tensor breaks one."""

    tensor: str  # its name: the address is that of an argument
    dtype: str  # a name of `attngen.spec.dtypes.DTYPES`
    sizes: tuple[int, ...]  # in elements
    strides: tuple[int, ...]  # in bytes, of all dimensions but the innermost
    box: tuple[int, ...]  # in elements
    swizzled: bool = True  # a row of the box is 128 bytes, its eight chunks permuted by xor with the number of the row mod 8

    def __post_init__(self) -> None:
        assert 1 <= len(self.sizes) <= MAX_RANK, self
        assert len(self.strides) == len(self.sizes) - 1, self
        assert len(self.box) == len(self.sizes), self
        assert all(1 <= n <= MAX_BOX for n in self.box), self
        row = self.box[0] * self.element_bytes
        assert row == SWIZZLE_BYTES if self.swizzled else row % ALIGNMENT == 0, self
        for axis, size in enumerate(self.sizes):
            if not 1 <= size <= MAX_SIZE:
                raise TensorMapError(
                    f"`{self.tensor}` has {size} elements in dimension {axis}, counted from the last; TMA takes 1 to 2^32"
                )
        for axis, stride in enumerate(self.strides, 1):
            if stride % ALIGNMENT or not 0 <= stride < MAX_STRIDE:
                raise TensorMapError(
                    f"`{self.tensor}` has a stride of {stride} bytes in dimension {axis}, counted from the last; TMA needs a "
                    f"multiple of {ALIGNMENT} bytes, not negative and below 2^40. {CURE}"
                )

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].bytes

    def check_address(self, pointer: int) -> None:
        """Raises TensorMapError if TMA cannot take the address."""
        if pointer % ALIGNMENT:
            raise TensorMapError(
                f"`{self.tensor}` starts at an address that is not a multiple of {ALIGNMENT} bytes, which TMA needs. {CURE}"
            )


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor map and the address of the tensor: what a device packs into 128 bytes."""

    map: TensorMap
    pointer: int


CURE = "Pass a contiguous copy, or use kernel tiled"
