"""`CudaDevice`: one GPU behind the device protocol."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from attngen.device.cuda.compiler import load_object
from attngen.device.protocol import DeviceError, Launch, Memory
from attngen.emit.kernel_source import KernelSource

ARCH_SUFFIX_FROM = 9  # from compute capability 9.0 on, the architecture-specific features are named by an `a`
STATIC_SHARED_LIMIT = 48 * 1024  # a block gets more dynamic shared memory only when its kernel asks


def arch_name(major: int, minor: int) -> str:
    """The architecture of a compute capability, as Arch rows are named: (8, 0) is sm_80, (9, 0) is sm_90a."""
    return f"sm_{major}{minor}{'a' if major >= ARCH_SUFFIX_FROM else ''}"


@dataclass(slots=True)
class CudaKernel:
    """A cubin loaded on one GPU. Entry points are looked up once."""

    source: KernelSource
    device: Any
    code: Any
    _entries: dict[str, Any] = field(default_factory=dict)

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        """Launch in order on the driver stream `stream` (the legacy default stream by default); nothing is waited for.

        Raises DeviceError where the driver refuses.
        """
        from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, Stream, launch

        self.device.set_current()
        place = Stream.from_handle(stream) if stream else LEGACY_DEFAULT_STREAM
        for one in launches:
            config = LaunchConfig(grid=one.grid, block=one.entry.block, shmem_size=one.entry.shared_bytes)
            launch(place, config, self._entry(one), *map(_argument, one.arguments))

    def _entry(self, one: Launch) -> Any:
        name = one.entry.name
        if name not in self._entries:
            kernel = self.code.get_kernel(name)
            if one.entry.shared_bytes > STATIC_SHARED_LIMIT:
                _allow_shared(kernel, one.entry.shared_bytes, self.device.device_id)
            self._entries[name] = kernel
        return self._entries[name]


def _argument(value: Any) -> Any:
    """Addresses as integers, which cuda.core passes in 64 bits; every other scalar as it is."""
    return value.value or 0 if isinstance(value, ctypes.c_void_p) else value


def _allow_shared(kernel: Any, size: int, ordinal: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, kernel.handle, ordinal)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the driver refused {size} bytes of shared memory for a block: {status.name}")


class CudaDevice:
    """One GPU. Raises DeviceError, with the cause, where there is none to use."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            from cuda.core import Device

            self._device: Any = Device(ordinal)
            self._device.set_current()
            major, minor = self._device.compute_capability
        except Exception as error:
            raise DeviceError(
                f"no usable GPU ({error}); use the emulated device, or see `attngen doctor` for what is missing"
            ) from error
        self.arch = arch_name(major, minor)
        self.name = f"cuda:{ordinal}"
        self.description: str = self._device.name
        self._kernels: dict[KernelSource, CudaKernel] = {}

    def compile(self, source: KernelSource) -> CudaKernel:
        """The kernel of `source`, compiled or taken from the cache. Raises CompilationError."""
        if source not in self._kernels:
            self._device.set_current()
            self._kernels[source] = CudaKernel(source, self._device, load_object(source))
        return self._kernels[source]
