"""A `TensorMap` packed for the emulated device."""

from __future__ import annotations

import ctypes
import struct

from attngen.device.protocol import OpaqueBytes
from attngen.device.tensor_map import MAX_RANK, TensorMap

BYTES, ALIGNMENT = 128, 64  # for the kernel's parameter, which compilers copy by aligned instructions
MAGIC = b"attnmap1"
_LAYOUT = struct.Struct("<8sQ5Q4Q5HBBB")  # `Map` of runtime/tma.cpp


def encode(tensor_map: TensorMap, pointer: int) -> OpaqueBytes:
    """The 128 bytes of a kernel's parameter; `pointer` is the tensor's address. Raises TensorMapError."""
    tensor_map.check_address(pointer)

    def padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
        return values + (1,) * (length - len(values))

    packed = _LAYOUT.pack(
        MAGIC,
        pointer,
        *padded(tensor_map.sizes, MAX_RANK),
        *padded(tensor_map.strides, MAX_RANK - 1),
        *padded(tensor_map.box, MAX_RANK),
        len(tensor_map.sizes),
        tensor_map.element_bytes,
        tensor_map.swizzled,
    )
    room = bytearray(BYTES + ALIGNMENT)
    at = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % ALIGNMENT
    room[at : at + len(packed)] = packed
    return (ctypes.c_ubyte * BYTES).from_buffer(room, at)
