"""A `TensorMap` packed for the GPU, by the driver."""

from __future__ import annotations

import ctypes

from attngen.device.cuda.memory import address_without_elements
from attngen.device.protocol import DeviceError, OpaqueBytes
from attngen.device.tensor_map import TensorMap

MAP_TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32", "fp8_e4m3": "UINT8", "fp8_e5m2": "UINT8"}


def encode(tensor_map: TensorMap, pointer: int) -> OpaqueBytes:
    """The 128 bytes of a kernel's parameter; `pointer` is the tensor's address on the device.

    Elements outside the tensor are zeros, and L2 fetches 256 bytes at a time. Raises TensorMapError, and DeviceError if the
    driver refuses.
    """
    from cuda.bindings import driver

    tensor_map.check_address(pointer)
    pointer = pointer or address_without_elements()
    swizzle = driver.CUtensorMapSwizzle
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAP_TYPES[tensor_map.dtype]}"),
        len(tensor_map.sizes),
        pointer,
        [driver.cuuint64_t(n) for n in tensor_map.sizes],
        [driver.cuuint64_t(n) for n in tensor_map.strides],
        [driver.cuuint32_t(n) for n in tensor_map.box],
        [driver.cuuint32_t(1) for _ in tensor_map.box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if tensor_map.swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise DeviceError(f"the driver refused a tensor map of {tensor_map}: {status.name}")
    return (ctypes.c_ubyte * 128).from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))
