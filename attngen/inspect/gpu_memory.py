"""Copies of numpy storage arrays to the GPU and back, by torch or CuPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attngen.device.protocol import DeviceError
from attngen.reference.problems import Array
from attngen.spec.dtypes import DTYPES, WITHOUT_NUMPY


def to_gpu(array: Array) -> object:
    """A copy of `array` on the GPU. Raises DeviceError if neither torch nor CuPy is installed."""
    if find_spec("torch") is not None:
        from attngen.reference.torch_oracle import to_torch

        return to_torch(array, "cuda")
    if find_spec("cupy") is not None and array.dtype.names is None:
        import cupy

        return cupy.asarray(array)
    raise DeviceError("checking on the GPU needs torch (or CuPy, not for bf16 or fp8); pip install torch, or --device emulated")


def from_gpu(array: Any) -> Array:
    """A numpy storage array with the same bits."""
    if hasattr(array, "cpu"):
        import torch

        host = array.detach().cpu()
        bits = {1: torch.uint8, 2: torch.int16}
        types = {getattr(torch, dtype.torch): dtype for dtype in DTYPES.values() if dtype.torch in WITHOUT_NUMPY}
        dtype = types.get(host.dtype)
        found: Array = host.numpy() if dtype is None else host.view(bits[dtype.bytes]).numpy().view(dtype.numpy)
    else:
        found = array.get()
    return found
