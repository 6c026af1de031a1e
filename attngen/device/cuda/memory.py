"""Memory of a GPU that attngen itself keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attngen.device.protocol import DeviceError

ALIGNED = 256  # bytes: the alignment of what the driver allocates


def zero_for_ever(stream: int) -> int:
    """The address of an int32 in the memory of the current context's GPU, zero for what is launched on the driver's `stream`
    from now on, and never freed. Works beside a capture of a CUDA graph in another thread. Raises DeviceError."""
    from cuda.bindings import driver

    with _beside_captures():
        address = int(_result(driver.cuMemAlloc(4)))
        _result(driver.cuMemsetD32Async(address, 0, 1, stream))
    return address


_elsewhere: dict[int, int] = {}  # by the number of the GPU


def address_without_elements() -> int:
    """An address in the memory of the current context's GPU for the tensor map of a tensor without elements, whose own is 0:
    TMA refuses address 0 even for a copy of which nothing lies in the map. Raises DeviceError."""
    from cuda.bindings import driver

    number = int(_result(driver.cuCtxGetDevice()))
    if number not in _elsewhere:
        with _beside_captures():
            _elsewhere[number] = int(_result(driver.cuMemAlloc(ALIGNED)))
    return _elsewhere[number]


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Allocations that another thread's capture of a CUDA graph does not forbid."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    usual = _result(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        _result(driver.cuThreadExchangeStreamCaptureMode(usual))


def _result(returned: tuple[Any, ...]) -> Any:
    status, *results = returned
    if status.value:
        raise DeviceError(f"the driver could not allocate memory of attngen's own: {status.name}")
    return results[0] if results else None
