"""Copies of numpy storage arrays to the GPU and back, by torch or CuPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attngen.device.protocol import DeviceError
from attngen.spec.dtypes import BF16, NUMPY_BFLOAT16


def to_gpu(array: Any) -> Any:
    """A copy of `array` on the GPU. Raises DeviceError if neither torch nor CuPy is installed."""
    if find_spec("torch") is not None:
        from attngen.reference.torch_oracle import to_torch

        return to_torch(array, "cuda")
    if find_spec("cupy") is not None and array.dtype != NUMPY_BFLOAT16:
        import cupy

        return cupy.asarray(array)
    raise DeviceError("checking on the GPU needs torch (or CuPy, but for bf16); pip install torch, or --device emulated")


def from_gpu(array: Any) -> Any:
    """A numpy storage array with the same bits."""
    if hasattr(array, "cpu"):
        import torch

        host = array.detach().cpu()
        return host.view(torch.int16).numpy().view(BF16.numpy) if host.dtype is torch.bfloat16 else host.numpy()
    return array.get()
