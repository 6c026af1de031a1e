"""The small protocol that both devices follow.

`device.compile(source)` gives a `Kernel`; `kernel.launch(launches, stream)` runs entry points in order. A `Launch` holds plain
ctypes values only: whoever makes it (`attngen.device.binding`) has already checked arrays and sizes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from attngen.device.tensor_map import MappedTensor
from attngen.emit.kernel_source import EntryPoint, KernelSource

CTypesScalar: TypeAlias = "ctypes._SimpleCData[Any]"
OpaqueBytes: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"  # a struct passed by value, as a tensor map is
Argument: TypeAlias = "CTypesScalar | OpaqueBytes | MappedTensor"

MAX_LOG = 4000  # characters of a compiler's output in a message; `log` holds all of it


class DeviceError(RuntimeError):
    """A device cannot do what was asked: no driver, no host compiler, a failed compilation or launch. Says the cure."""


class CompilationError(DeviceError):
    """The CUDA text did not compile: `log` is the compiler's output, with lines of the emitted file."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}:\n{log.strip()[:MAX_LOG]}")
        self.log = log


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `entry`: grid in blocks, arguments in the order of `entry.parameters`."""

    entry: EntryPoint
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of memory that the launches may touch; the emulated device's checked mode reports anything outside.

    A counter is set to 0 before the first launch.
    """

    name: str
    pointer: int
    bytes: int
    writable: bool
    counter: bool = False


class Kernel(Protocol):
    """A compiled `KernelSource`."""

    @property
    def source(self) -> KernelSource: ...

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        """Run `launches` in order. `stream` is a driver stream handle (cuda)."""
        ...


class Device(Protocol):
    """Somewhere to compile and run."""

    @property
    def name(self) -> str: ...

    @property
    def arch(self) -> str: ...

    @property
    def multiprocessors(self) -> int: ...

    def compile(self, source: KernelSource) -> Kernel: ...
