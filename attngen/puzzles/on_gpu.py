"""A student's file that the emulated device found right, on a GPU: the same launch, its results, and its rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attngen.device.cuda import CudaDevice
from attngen.device.protocol import DeviceError, Memory
from attngen.device.select import has_gpu
from attngen.emit.program import Program
from attngen.plan.arch import ARCHES
from attngen.puzzles.puzzle import Array, Case
from attngen.puzzles.running import GARBAGE, launch_of, outputs_of

WARM_UP, LAUNCHES = 3, 20  # launches that are not timed, and those whose mean time is stated


@dataclass(frozen=True, slots=True)
class OnGpu:
    """One case on a GPU: what it wrote, and the mean time of a launch. Bytes are those of the arrays, each counted once."""

    gpu: str
    what: str  # the case's sizes, in words
    written: dict[str, Array]
    microseconds: float
    bytes: int
    operations: int

    @property
    def rates(self) -> str:
        """Rates in words: of memory, and of arithmetic where the case counts operations."""
        rates = [f"{self.bytes / self.microseconds / 1e3:.1f} GB/s"]
        if self.operations:
            rates.append(f"{self.operations / self.microseconds / 1e6:.2f} TFLOP/s")
        return ", ".join(rates)


def gpu_for(arch: str) -> CudaDevice | None:
    """The first GPU; None if there is none, or if it lacks instructions that `arch` has. Raises DeviceError."""
    if not has_gpu():
        return None
    device = CudaDevice()
    return device if device.arch in ARCHES and ARCHES[device.arch].has(*ARCHES[arch].features) else None


def run_on_gpu(device: CudaDevice, program: Program, case: Case) -> OnGpu:
    """The case on `device`. Raises DeviceError if the driver refuses, CompilationError if the file does not compile for it."""
    kernel = device.compile(replace(program, arch=device.arch))
    outputs = outputs_of(program, case)
    arrays = {name: one for name, one in case.given.items() if isinstance(one, np.ndarray)}
    arrays |= {n: np.full(case.expected[n].shape, 0, t) for n, t in outputs.items() if n not in arrays}
    with _on_gpu(arrays, {name for name in outputs if name not in case.given}) as addresses:
        launch = launch_of(program, case, addresses)
        memory = tuple(Memory(n, addresses[n], a.nbytes, n in case.expected) for n, a in arrays.items())
        kernel.launch((launch,), memory)
        written = {name: _copied_back(arrays[name], addresses[name]) for name in case.expected}
        again = kernel.repeat((launch,), ())  # packed once: the host is faster than a short kernel
        seconds = _mean_seconds(lambda: again((), 0))
    return OnGpu(device.description, case.what, written, 1e6 * seconds, sum(a.nbytes for a in arrays.values()), case.operations)


@contextmanager
def _on_gpu(arrays: dict[str, Array], garbage: set[str]) -> Iterator[dict[str, int]]:
    """Addresses of copies of the arrays in the GPU's memory; those named in `garbage` hold what nobody wrote."""
    from cuda.bindings import driver

    addresses: dict[str, int] = {}
    try:
        for name, array in arrays.items():
            addresses[name] = int(_done(driver.cuMemAlloc(array.nbytes)))
            if name in garbage:
                _done(driver.cuMemsetD8(addresses[name], GARBAGE, array.nbytes))
            else:
                whole = np.ascontiguousarray(array)
                _done(driver.cuMemcpyHtoD(addresses[name], whole.ctypes.data, whole.nbytes))
        yield addresses
    finally:
        for address in addresses.values():
            driver.cuMemFree(address)


def _copied_back(like: Array, address: int) -> Array:
    from cuda.bindings import driver

    found = np.empty(like.shape, like.dtype)
    _done(driver.cuMemcpyDtoH(found.ctypes.data, address, found.nbytes))
    return found


def _mean_seconds(launch: Callable[[], None]) -> float:
    """Mean seconds of a launch, by events around many. A kernel that adds to its output goes on adding."""
    from cuda.bindings import driver

    begin, end = (_done(driver.cuEventCreate(0)) for _ in range(2))
    for _ in range(WARM_UP):
        launch()
    _done(driver.cuEventRecord(begin, 0))
    for _ in range(LAUNCHES):
        launch()
    _done(driver.cuEventRecord(end, 0))
    _done(driver.cuEventSynchronize(end))
    seconds = _done(driver.cuEventElapsedTime(begin, end)) / 1e3 / LAUNCHES
    for event in (begin, end):
        driver.cuEventDestroy(event)
    return float(seconds)


def _done(returned: tuple[Any, ...]) -> Any:
    """The driver's result. Raises DeviceError if it has none: after an access outside an array, for instance."""
    status, *results = returned
    if status.value:
        raise DeviceError(f"the GPU stopped: {status.name}")
    return results[0] if results else None
