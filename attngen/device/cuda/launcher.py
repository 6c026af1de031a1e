"""Launches with little host time: all parameters of a call except addresses are packed once and copied as bytes."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attngen.device.cuda.tensor_map import encode
from attngen.device.protocol import DeviceError, Launch
from attngen.device.tensor_map import MappedTensor, TensorMap

if TYPE_CHECKING:
    from cuda.bindings.driver import CUfunction, CUresult, CUstream
    from cuda.core import Device

_FORMATS = {ctypes.c_void_p: "P", ctypes.c_longlong: "q", ctypes.c_int: "i", ctypes.c_float: "f", ctypes.c_bool: "?"}

MAP_WORDS = 16  # 8 bytes each
MAX_MAPS = 1024  # packed tensor maps that one parameter remembers


class PackedMaps(dict[int, memoryview]):
    """The words of one tensor-map parameter by the tensor's address: packing takes the driver some microseconds."""

    def __init__(self, described: TensorMap) -> None:
        super().__init__()
        self._described = described

    def __missing__(self, address: int) -> memoryview:
        """Packs the map. Raises TensorMapError, DeviceError."""
        while len(self) >= MAX_MAPS:
            self.pop(next(iter(self)), None)
        packed = self[address] = memoryview(bytes(encode(self._described, address))).cast("Q")
        return packed


@dataclass(frozen=True, slots=True)
class Step:
    """One launch."""

    geometry: tuple[
        CUfunction, int, int, int, int, int, int, int
    ]  # function, grid, block, shared bytes: as the driver takes them
    template: bytes  # its packed parameters
    offsets: tuple[int, ...]
    slots: tuple[tuple[int, int], ...]  # the addresses in it: which eight bytes, which address
    maps: tuple[tuple[int, int, PackedMaps], ...]  # the tensor maps, packed by address
    early: bool


def pack(function: CUfunction, launch: Launch, order: Sequence[str]) -> Step:
    """The launch as a Step. `order` names the tensors whose addresses `Repeated` is called with; the others keep theirs.

    Parameters lie at multiples of their own size, tensor maps at multiples of eight bytes; the driver gets the offset of each.
    """
    buffer = bytearray()
    offsets, slots, maps = [], [], []
    for parameter, value in zip(launch.entry.parameters, launch.arguments, strict=True):
        if isinstance(value, MappedTensor):
            packed = PackedMaps(value.map)
            buffer += bytes(-len(buffer) % 8)
            offsets.append(len(buffer))
            if parameter.of in order:
                maps.append((len(buffer) // 8, order.index(parameter.of), packed))
            buffer += packed[value.pointer].tobytes()
            continue
        assert not isinstance(value, ctypes.Array)
        size = ctypes.sizeof(value)
        buffer += bytes(-len(buffer) % size)
        offsets.append(len(buffer))
        if parameter.binding == "data" and parameter.of in order:
            slots.append((len(buffer) // 8, order.index(parameter.of)))
        buffer += struct.pack(_FORMATS[type(value)], value.value or 0)
    entry = launch.entry
    geometry = (function, *launch.grid, *entry.block, entry.shared_bytes)
    return Step(geometry, bytes(buffer), tuple(offsets), tuple(slots), tuple(maps), entry.early)


class _Buffers:
    """One thread's parameter memory for one step. The driver copies it before a launch returns."""

    __slots__ = ("_arguments", "_keep", "address", "early", "geometry", "maps", "slots", "words")

    def __init__(self, step: Step) -> None:
        memory = (ctypes.c_uint64 * (-(-len(step.template) // 8)))()  # uint64: aligned for every parameter
        start = ctypes.addressof(memory)
        self._arguments = (ctypes.c_void_p * len(step.offsets))(*(start + o for o in step.offsets))
        self.words = memoryview(memory).cast("B")
        self.words[: len(step.template)] = step.template
        self.words = self.words.cast("Q")
        self._keep = memory
        self.address = ctypes.addressof(self._arguments)
        self.geometry, self.slots, self.maps = step.geometry, step.slots, step.maps
        self.early = early_launch(step) if step.early else None


class Repeated:
    """The launches of one call signature, repeated with other addresses. Safe from several threads."""

    def __init__(self, steps: tuple[Step, ...], device: Device) -> None:
        self._steps = steps
        self._device = device
        self._threads = threading.local()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on the driver stream `stream`, whose context must be current. Raises DeviceError if the driver refuses."""
        try:
            buffers = self._threads.buffers
        except AttributeError:
            self._device.set_current()  # this thread has not used the GPU yet
            buffers = self._threads.buffers = tuple(_Buffers(s) for s in self._steps)
        place = _streams.get(stream) or _stream(stream)
        for memory in buffers:
            words = memory.words
            for word, which in memory.slots:
                words[word] = addresses[which]
            for word, which, packed in memory.maps:
                words[word : word + MAP_WORDS] = packed[addresses[which]]
            if memory.early is None:
                (status,) = _launch(*memory.geometry, place, memory.address, 0)
            else:
                status = memory.early(place, memory.address)
            if status:
                gx, gy, gz = memory.geometry[1:4]
                raise DeviceError(f"the driver refused a launch of {gx} x {gy} x {gz} blocks: {status.name}")


def early_launch(step: Step) -> Callable[[CUstream, int], CUresult]:
    """The launch of a kernel that may start before the one in front of it ends: by stream and address of the parameters."""
    from cuda.bindings import driver

    function, *sizes = step.geometry
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    (
        config.gridDimX, config.gridDimY, config.gridDimZ,
        config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes,
    ) = sizes  # fmt: skip

    def launch(stream: CUstream, parameters: int) -> CUresult:
        config.hStream = stream
        (status,) = driver.cuLaunchKernelEx(config, function, parameters, 0)
        return status

    return launch


_streams: dict[int, CUstream] = {}


def _stream(handle: int) -> CUstream:
    from cuda.bindings import driver

    found = _streams[handle] = driver.CUstream(handle)
    return found


def _launch(*arguments: object) -> tuple[CUresult]:
    """`cuLaunchKernel`, bound at the first launch: importing the driver's bindings needs no GPU, but takes time."""
    global _launch
    from cuda.bindings import driver

    _launch = driver.cuLaunchKernel
    return _launch(*arguments)
