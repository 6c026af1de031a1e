"""An array whose memory is said to be a GPU's, for the Python extension of a library on the emulated device."""

from __future__ import annotations

import ctypes

import numpy as np

CUDA = 2  # the kind of device in DLPack
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class OnGpu:
    """An array as an exporter of DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, stream: int | None = None) -> object:
        capsule = self.array.__dlpack__()
        address = pointer(capsule, b"dltensor")
        assert address is not None
        ctypes.c_int32.from_address(address + 8).value = CUDA
        return capsule


def workspace_of(size: int) -> OnGpu:
    """Memory as a library requires it."""
    memory = np.zeros(size + 256, np.uint8)
    return OnGpu(memory[-memory.ctypes.data % 256 :][:size])
