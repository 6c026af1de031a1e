"""Which device runs a kernel when the caller does not say."""

from __future__ import annotations

import sys
import warnings
from functools import cache

from attngen.device.protocol import Device
from attngen.diagnostics import ArgumentError


class EmulatedDeviceWarning(UserWarning):
    """The emulated device runs a call that did not request it: results are right, but a GPU is thousands of times faster."""


class _Said:
    """Whether the warning was given, or is not needed."""

    emulated = False


def emulated_by_name() -> None:
    """The caller requests the emulated device by name: no `warn_emulated` from now on."""
    _Said.emulated = True


def warn_emulated(what: str, cure: str) -> None:
    """Warns, once per process, that the emulated device runs `what`."""
    if _Said.emulated:
        return
    _Said.emulated = True
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("attngen", "torch", "jax"):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"the emulated device runs {what}: it executes the CUDA kernel on the CPU, thread by thread, for tests and learning. "
        f"{cure} (This warning is given once per process; its category is attngen.EmulatedDeviceWarning.)",
        EmulatedDeviceWarning,
        stacklevel=level,
    )


@cache
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


@cache
def device_by_name(name: str) -> Device:
    """ "cuda", "cuda:N", "emulated" (checked), "emulated:fast", or "auto": cuda where there is a GPU, else emulated.

    Each name has one device. Raises ArgumentError for any other name, DeviceError where the device cannot be used.
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
    raise ArgumentError(f"no device is called {name!r}; expected cuda, cuda:N, emulated, emulated:fast or auto")
