"""Memory of a GPU that attngen itself keeps."""

from __future__ import annotations

from typing import Any

from attngen.device.protocol import DeviceError


def zero_for_ever(stream: int) -> int:
    """The address of an int32 in the memory of the current context's GPU, zero for what is launched on the driver's `stream`
    from now on, and never freed. Works beside a capture of a CUDA graph in another thread. Raises DeviceError."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    usual = _result(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        address = int(_result(driver.cuMemAlloc(4)))
        _result(driver.cuMemsetD32Async(address, 0, 1, stream))
    finally:
        _result(driver.cuThreadExchangeStreamCaptureMode(usual))
    return address


def _result(returned: tuple[Any, ...]) -> Any:
    status, *results = returned
    if status.value:
        raise DeviceError(f"the driver could not allocate a counter: {status.name}")
    return results[0] if results else None
