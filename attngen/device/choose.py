"""Which device runs a kernel when the caller does not say."""

from __future__ import annotations

from functools import lru_cache

from attngen.device.protocol import Device


@lru_cache(maxsize=1)
def has_gpu() -> bool:
    """Whether a driver and a GPU are there to use."""
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return False
        status, count = driver.cuDeviceGetCount()
        return bool(status == driver.CUresult.CUDA_SUCCESS and count > 0)
    except Exception:  # no driver library: cuda.bindings raises what the loader says
        return False


def device_by_name(name: str) -> Device:
    """ "cuda", "cuda:N", "emulated" (checked), "emulated:fast", or "auto": cuda where there is a GPU, else emulated.

    Raises ValueError for any other name, DeviceError where the device cannot be used.
    """
    if name == "auto":
        name = "cuda" if has_gpu() else "emulated"
    kind, _, detail = name.partition(":")
    if kind == "cuda" and (not detail or detail.isdecimal()):
        from attngen.device.cuda import CudaDevice

        return CudaDevice(int(detail or 0))
    if kind == "emulated" and detail in ("", "fast"):
        from attngen.device.emulated import EmulatedDevice

        return EmulatedDevice(checked=detail != "fast")
    raise ValueError(f"no device is called {name!r}; expected cuda, cuda:N, emulated, emulated:fast or auto")
