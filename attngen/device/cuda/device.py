"""`CudaDevice`: one GPU behind the device protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from attngen.device.cuda.compiler import cubin
from attngen.device.cuda.launcher import Repeated, pack
from attngen.device.protocol import DeviceError, Launch, Memory
from attngen.emit.program import Program

if TYPE_CHECKING:
    from cuda.bindings.driver import CUfunction
    from cuda.core import Device, Kernel, ObjectCode

ARCH_SUFFIX_FROM = 9  # from compute capability 9.0 on, the suffix `a` selects architecture-specific features
STATIC_SHARED_LIMIT = 48 * 1024  # more dynamic shared memory per block requires an attribute of the kernel


def arch_name(major: int, minor: int) -> str:
    """The name of the Arch row of a compute capability: (8, 0) is sm_80, (9, 0) is sm_90a."""
    return f"sm_{major}{minor}{'a' if major >= ARCH_SUFFIX_FROM else ''}"


@dataclass(slots=True)
class CudaKernel:
    """A cubin loaded on one GPU. Entry points are looked up once."""

    source: Program
    device: Device
    code: ObjectCode
    _entries: dict[str, CUfunction] = field(default_factory=dict)

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        """Launches in order on the driver stream `stream` (by default the legacy default stream), without synchronization.

        Raises DeviceError if the driver refuses.
        """
        from cuda.bindings import driver

        self.device.set_current()
        for counter in (m for m in memory if m.counter):
            (status,) = driver.cuMemsetD32Async(counter.pointer, 0, counter.bytes // 4, stream or 0)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise DeviceError(f"the driver could not set a counter to zero: {status.name}")
        self.repeat(launches, ())((), stream or 0)

    def repeat(self, launches: tuple[Launch, ...], order: tuple[str, ...]) -> Repeated:
        """`launches` packed for repetition with other addresses of the tensors in `order`. Raises DeviceError."""
        self.device.set_current()  # the driver packs tensor maps in a context, and this thread may not have used the GPU yet
        return Repeated(tuple(pack(self._entry(one), one, order) for one in launches), self.device)

    def make_current(self) -> None:
        """Makes the GPU's context the thread's, which a repetition asks of its caller."""
        self.device.set_current()

    def _entry(self, one: Launch) -> CUfunction:
        name = one.entry.name
        if name not in self._entries:
            from cuda.bindings import driver

            kernel = self.code.get_kernel(name)
            if one.entry.shared_bytes > STATIC_SHARED_LIMIT:
                _allow_shared(kernel, one.entry.shared_bytes, self.device.device_id)
            self._entries[name] = driver.CUfunction(int(kernel.handle))  # a CUkernel is valid in the current context
        return self._entries[name]


def _allow_shared(kernel: Kernel, size: int, ordinal: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, kernel.handle, ordinal)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the driver refused {size} bytes of shared memory for a block: {status.name}")


class CudaDevice:
    """One GPU. Raises DeviceError with the cause if there is no usable one."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            from cuda.core import Device

            self._device = Device(ordinal)
            self._device.set_current()
            major, minor = self._device.compute_capability
        except Exception as error:
            raise DeviceError(
                f"no usable GPU ({error}); use the emulated device, or see `attngen doctor` for what is missing"
            ) from error
        self.arch = arch_name(major, minor)
        self.name = f"cuda:{ordinal}"
        self.description: str = self._device.name
        self.multiprocessors: int = self._device.properties.multiprocessor_count
        self._kernels: dict[Program, CudaKernel] = {}
        self._lock = Lock()

    def compile(self, source: Program) -> CudaKernel:
        """The kernel of `source`, compiled or taken from the cache. Raises CompilationError."""
        with self._lock:
            if source not in self._kernels:
                from cuda.core import ObjectCode

                self._device.set_current()
                code = ObjectCode.from_cubin(cubin(source), name=source.name)
                self._kernels[source] = CudaKernel(source, self._device, code)
            return self._kernels[source]
