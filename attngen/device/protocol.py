"""The protocol of devices.

`device.compile(program)` returns a `Kernel`; `kernel.launch(launches, memory, stream)` runs the program's kernels in order. A
`Launch` holds plain ctypes values: `attngen.device.binding` has checked arrays and sizes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from attngen.device.arrays import ArrayView
from attngen.device.tensor_map import MappedTensor
from attngen.emit.program import KernelEntry, Program

CTypesScalar: TypeAlias = "ctypes._SimpleCData[Any]"
OpaqueBytes: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"  # a struct passed by value, as a tensor map is
Argument: TypeAlias = "CTypesScalar | OpaqueBytes | MappedTensor"

MAX_LOG = 4000  # characters of a compiler's output in a message; `log` holds all of it


class DeviceError(RuntimeError):
    """A device cannot compile or launch: no driver, no host compiler, an error of either. The text names the cure."""


class CompilationError(DeviceError):
    """The CUDA text did not compile: `log` is the compiler's output, with lines of the emitted file."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}:\n{log.strip()[:MAX_LOG]}")
        self.message, self.log = message, log

    def __reduce__(self) -> tuple[type[CompilationError], tuple[str, str]]:
        """Another process gets the same error."""
        return type(self), (self.message, self.log)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `entry`: grid in blocks, arguments in the order of `entry.parameters`."""

    entry: KernelEntry
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a tensor that the launches may access: the smallest range with all elements of `array`, or a whole range
    without one. The emulated device's checked mode reports accesses to anything else."""

    name: str
    pointer: int
    bytes: int
    writable: bool
    counter: bool = False  # set to 0 before the first launch
    array: ArrayView | None = None


class Kernel(Protocol):
    """A compiled `Program`."""

    @property
    def source(self) -> Program: ...

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        """Run `launches` in order. `stream` is a driver stream handle (cuda)."""
        ...


class Device(Protocol):
    """A GPU, or the emulated device."""

    @property
    def name(self) -> str: ...

    @property
    def arch(self) -> str: ...

    @property
    def multiprocessors(self) -> int: ...

    def compile(self, source: Program) -> Kernel: ...
