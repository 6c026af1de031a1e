"""XLA's foreign function interface: a Python function as the handler of custom calls.

The structures are those of xla/ffi/api/c_api.h, version 0.x, whose layout XLA keeps stable; `jax.ffi.include_dir()` has the
header. XLA calls the handler in its own threads, which take Python's lock for the time that a call's launches are put on the
stream.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from attngen.device.arrays import CPU, ArrayView, Location, contiguous_strides
from attngen.device.protocol import DeviceError
from attngen.jax.repeated import ALIGNMENT
from attngen.spec.dtypes import DTYPES, DType

OLDEST = 0, 1  # version of the interface, of jax 0.6
METADATA = 1  # XLA_FFI_Extension_Metadata
STRING = 4  # XLA_FFI_AttrType_STRING
INVALID_ARGUMENT, INTERNAL = 3, 13  # XLA_FFI_Error_Code
XLA_ALIGNMENT = 16  # bytes, the most that XLA promises for memory of a call: it refuses a call that asks for more
# XLA_FFI_DataType
TYPES = {1: "bool", 4: "int32", 5: "int64", 10: "fp16", 11: "fp32", 16: "bf16", 19: "fp8_e5m2", 20: "fp8_e4m3"}


class Structure(ctypes.Structure):
    """A structure of the interface, which begins with its own size and a list of extensions."""

    @classmethod
    def sized(cls, **members: object) -> Self:
        return cls(struct_size=ctypes.sizeof(cls), **members)


HEAD = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p))


class Span(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_void_p), ("len", ctypes.c_size_t))

    @property
    def text(self) -> str:
        return ctypes.string_at(self.ptr, self.len).decode()


class Version(Structure):
    _fields_ = (*HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int))


class Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32))


class Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),  # if it is of this type
    )


class ErrorCreate(Structure):
    _fields_ = (*HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int))


class ErrorOnly(Structure):
    _fields_ = (*HEAD, ("error", ctypes.c_void_p))


class ErrorMessage(Structure):
    _fields_ = (*HEAD, ("error", ctypes.c_void_p), ("message", ctypes.c_char_p))


class StreamGet(Structure):
    _fields_ = (*HEAD, ("ctx", ctypes.c_void_p), ("stream", ctypes.c_void_p))


class Allocate(Structure):
    _fields_ = (
        *HEAD,
        ("ctx", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("alignment", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


class Free(Structure):
    _fields_ = (*HEAD, ("ctx", ctypes.c_void_p), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p))


def _function(argument: type[Structure]) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(argument))


class Api(Structure):
    _fields_ = (
        *HEAD,
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("error_create", _function(ErrorCreate)),
        ("error_message", _function(ErrorMessage)),
        ("error_destroy", _function(ErrorOnly)),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _function(StreamGet)),
        ("type_register", ctypes.c_void_p),
        ("context_get", ctypes.c_void_p),
        ("state_set", ctypes.c_void_p),
        ("state_get", ctypes.c_void_p),
        ("memory_allocate", _function(Allocate)),
        ("memory_free", _function(Free)),
    )


class Buffer(Structure):
    _fields_ = (
        *HEAD,
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class Values(Structure):
    """XLA_FFI_Args, or XLA_FFI_Rets."""

    _fields_ = (
        *HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class Attributes(Structure):
    _fields_ = (
        *HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(Span))),
        ("values", ctypes.POINTER(ctypes.POINTER(Span))),  # strings
    )


class Frame(Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = (
        *HEAD,
        ("api", ctypes.POINTER(Api)),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", Values),
        ("rets", Values),
        ("attrs", Attributes),
    )


@dataclass(slots=True)
class Memory:
    """The memory of a device for the time of a call: where the call's arrays lie, and from where its workspaces are taken."""

    frame: Frame
    location: Location
    _taken: list[tuple[int, int]] = field(default_factory=list)

    def of(self, buffer: Buffer, name: str) -> ArrayView:
        """An array of the call, contiguous."""
        dtype, shape = DTYPES[TYPES[buffer.dtype]], tuple(buffer.dims[: buffer.rank])
        return self._view(name, buffer.data or 0, shape, dtype)

    def empty_view(self, shape: tuple[int, ...], dtype: DType, name: str) -> ArrayView:
        """A workspace. XLA gives its memory to later work of the same stream, after this call's kernels. Raises DeviceError."""
        size = math.prod(shape) * dtype.bytes
        return self._view(name, self.scratch(size) if size else 0, shape, dtype)

    def scratch(self, size: int) -> int:
        """The address of so many bytes, a multiple of ALIGNMENT, for the kernels of this call. Raises DeviceError."""
        size += ALIGNMENT - XLA_ALIGNMENT
        wanted = Allocate.sized(ctx=self.frame.ctx, size=size, alignment=XLA_ALIGNMENT)
        self._check(self.frame.api.contents.memory_allocate(wanted))
        self._taken.append((wanted.data, size))
        return -(-int(wanted.data) // ALIGNMENT) * ALIGNMENT

    def stream(self) -> int:
        """The driver's handle of XLA's stream. Raises DeviceError."""
        wanted = StreamGet.sized(ctx=self.frame.ctx)
        self._check(self.frame.api.contents.stream_get(wanted))
        return wanted.stream or 0

    def free(self) -> None:
        for data, size in self._taken:
            self._check(self.frame.api.contents.memory_free(Free.sized(ctx=self.frame.ctx, size=size, data=data)))
        self._taken.clear()

    def _view(self, name: str, pointer: int, shape: tuple[int, ...], dtype: DType) -> ArrayView:
        return ArrayView(name, pointer, shape, contiguous_strides(shape), dtype, self.location, self)

    def _check(self, error: int | None) -> None:
        """Raises DeviceError with what XLA says, if it says anything."""
        if error:
            api, said = self.frame.api.contents, ErrorMessage.sized(error=error)
            api.error_message(said)
            words = (said.message or b"").decode("utf-8", "replace")
            api.error_destroy(ErrorOnly.sized(error=error))
            raise DeviceError(f"XLA: {words}")


class HostMemory(Memory):
    """The same on the CPU, where XLA has neither a stream nor workspaces."""

    def empty_view(self, shape: tuple[int, ...], dtype: DType, name: str) -> ArrayView:
        made = np.empty(max(math.prod(shape) * dtype.bytes, 1), np.uint8)
        made[...] = 0xFF  # NaN in every type: an element that is read before it is written is noticed
        view = self._view(name, made.ctypes.data, shape, dtype)
        return ArrayView(name, view.pointer, shape, view.strides, dtype, CPU, self, keep=made)

    def stream(self) -> None:  # type: ignore[override]
        return None


Run = Callable[[str, Location, list[ArrayView], list[ArrayView], int | None], None]
Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))


def handler(run: Run, attribute: str, on_gpu: bool) -> object:
    """A handler of custom calls, which must be kept as long as they may be made. It calls `run`(the value of `attribute`, where
    the arrays lie, inputs, results, stream); what `run` raises is XLA's error. The arrays have no names."""

    def handle(pointer: ctypes._Pointer[Frame]) -> int | None:
        frame = pointer.contents
        if frame.extension_start and (extension := Extension.from_address(frame.extension_start)).type == METADATA:
            return _describe(frame, extension.metadata.contents)
        try:
            memory = Memory(frame, Location("cuda", _ordinal(frame))) if on_gpu else HostMemory(frame, CPU)
            inputs, results = ([memory.of(v.values[i].contents, "") for i in range(v.size)] for v in (frame.args, frame.rets))
            try:
                run(_attribute(frame.attrs, attribute), memory.location, inputs, results, memory.stream())
            finally:
                memory.free()
        except BaseException as error:  # nothing may be raised through XLA
            return _error(frame, INVALID_ARGUMENT if isinstance(error, ValueError) else INTERNAL, str(error))
        return None

    return Handler(handle)


def _describe(frame: Frame, metadata: Metadata) -> int | None:
    """Answers XLA's question for the handler's version of the interface, when it is registered: XLA's own, or OLDEST if XLA
    does not say its own."""
    api = frame.api
    major, minor = (api.contents.version.major, api.contents.version.minor) if api else OLDEST
    if major != OLDEST[0]:
        return _error(frame, INTERNAL, f"attngen knows version {OLDEST[0]} of XLA's interface, and this is {major}")
    metadata.version.major, metadata.version.minor, metadata.traits = major, minor, 0
    return None


def _error(frame: Frame, code: int, message: str) -> int | None:
    made = ErrorCreate.sized(message=message.encode(), code=code)
    error: int | None = frame.api.contents.error_create(made)
    return error


def _attribute(attrs: Attributes, name: str) -> str:
    for i in range(attrs.size):
        if attrs.names[i].contents.text == name and attrs.types[i] == STRING:
            return str(attrs.values[i].contents.text)
    raise DeviceError(f"XLA's call has no attribute {name}")


def _ordinal(frame: Frame) -> int:
    """The number of the GPU that holds the call's arrays. Raises DeviceError."""
    from cuda.bindings import driver

    buffers = [v.values[i].contents for v in (frame.rets, frame.args) for i in range(v.size)]
    address = next((b.data for b in buffers if b.data and math.prod(b.dims[: b.rank])), None)
    if address is None:  # no array has an element
        return 0
    status, ordinal = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the driver does not know the address of an array of JAX: {status.name}")
    return int(ordinal)
