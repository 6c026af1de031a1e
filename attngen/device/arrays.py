"""Arrays of any library as plain values: address, shape, strides, element type, location.

torch tensors are read through their own attributes, everything else through numpy's or CUDA's array interface or DLPack. No
library is imported here that the caller has not imported.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

import numpy as np

from attngen.diagnostics import ArgumentError as ArgumentError
from attngen.spec.dtypes import DTYPES, DType, from_storage, round_to_storage
from attngen.spec.dtypes import NUMPY_BFLOAT16 as NUMPY_BFLOAT16

if TYPE_CHECKING:
    import torch


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type or element type that cannot be used."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where memory lies: `kind` "cpu" or "cuda" and the device's number."""

    kind: str
    ordinal: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


CPU = Location("cpu")


@dataclass(frozen=True, slots=True)
class ArrayView:
    """One array of any library."""

    name: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: DType
    location: Location
    owner: Any  # the caller's array
    writable: bool = True  # its library's flag
    keep: object = None  # keeps its memory alive if the owner does not


_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values()}
_BY_NAME = {dtype.torch: dtype for dtype in DTYPES.values()}
_BY_TORCH: dict[torch.dtype, DType] = {}


def view(array: object, name: str, dtypes: Collection[str] = DTYPES) -> ArrayView:
    """`array` as an ArrayView.

    Raises ArgumentTypeError for what is no array or has an element type that no kernel knows, which names `dtypes`, those that
    the argument may have; ArgumentError if elements do not lie at multiples of their size, which no kernel can read.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        found = _of_torch(array, name, dtypes, torch)
    elif isinstance(array, (np.ndarray, np.generic)):
        found = _of_numpy(np.asanyarray(array), name, dtypes)
    elif (interface := _cuda_interface(array)) is not None:
        found = _of_cuda_interface(array, interface, name, dtypes)
    elif hasattr(array, "__dlpack__"):
        found = _of_dlpack(array, name, dtypes)
    else:
        raise ArgumentTypeError(
            f"`{name}` is a {type(array).__name__}; expected an array: torch, numpy, CuPy or anything with DLPack"
        )
    if found.pointer % found.dtype.bytes:
        raise ArgumentError(
            f"`{name}` starts at an address that is not a multiple of its element size, {found.dtype.bytes} bytes; pass a copy"
        )
    return found


def _of_torch(tensor: torch.Tensor, name: str, dtypes: Collection[str], torch: ModuleType) -> ArrayView:
    if not _BY_TORCH:
        _BY_TORCH.update({getattr(torch, dtype.torch): dtype for dtype in DTYPES.values()})
    dtype = _BY_TORCH.get(tensor.dtype)
    if dtype is None:
        raise _unknown_dtype(name, str(tensor.dtype).removeprefix("torch."), dtypes)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"`{name}` requires grad, and this call records no gradient: only calls of attngen.torch do, and calls without "
            "`out`, `lse` and `stream` of specs that were compiled after its import, without `arch`, for a device that "
            f"`device` names (auto, cuda or emulated). Pass {name}.detach(), or use torch.no_grad()"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ArgumentTypeError(f"`{name}` is a {layout} tensor; expected a dense one; pass a padded or dense copy")
    if tensor.is_neg():
        raise ArgumentError(f"`{name}` is a negated view: torch has not negated its memory yet; pass {name}.resolve_neg()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"`{name}` is on {tensor.device}; expected a tensor on the CPU or on a CUDA device")
    location = CPU if tensor.device.type == "cpu" else Location("cuda", tensor.device.index or 0)
    return ArrayView(name, _address(tensor, name), tuple(tensor.shape), tuple(tensor.stride()), dtype, location, tensor)


def _address(tensor: torch.Tensor, name: str) -> int:
    """The address of a tensor's elements. Raises ArgumentTypeError if it has none, as in torch's tracing and vmap."""
    try:
        address = int(tensor.data_ptr()) if type(tensor).__name__ != "FakeTensor" else 0
    except RuntimeError:
        address = 0
    if not address and tensor.numel():
        raise ArgumentTypeError(
            f"`{name}` is a tensor without memory: torch is tracing or transforming a function. Call without `out`, `lse` and "
            "`stream`, which tracing supports"
        )
    return address


def mark_written(arrays: Iterable[object]) -> None:
    """Tells torch that a kernel has written to those of `arrays` that are its tensors: a backward that has saved one raises."""
    torch = sys.modules.get("torch")
    for array in arrays:
        if torch is not None and isinstance(array, torch.Tensor):
            torch.autograd.graph.increment_version(array)


def _of_numpy(array: np.ndarray, name: str, dtypes: Collection[str]) -> ArrayView:
    # the first look at `np.ma` imports it, which takes 25 ms
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise ArgumentTypeError(f"`{name}` is a masked array, and kernels do not read its mask; pass {name}.filled(...)")
    dtype = _BY_NUMPY.get(array.dtype) or _BY_NAME.get(array.dtype.name)
    if dtype is None:
        raise _unknown_dtype(name, str(array.dtype), dtypes)
    if not array.dtype.isnative:
        native = f"{name}.astype({name}.dtype.newbyteorder('='))"
        raise ArgumentTypeError(f"`{name}` has elements of {array.dtype.str}, in the other byte order; pass {native}")
    strides = _in_elements(array.strides, array.itemsize, name)
    return ArrayView(name, array.ctypes.data, array.shape, strides, dtype, CPU, array, array.flags.writeable)


class CudaInterface(TypedDict):
    """What `__cuda_array_interface__` has (version 3)."""

    shape: Sequence[int]
    typestr: str
    data: tuple[int, bool]  # the address, and whether it is read-only
    strides: NotRequired[Sequence[int] | None]  # in bytes
    mask: NotRequired[object]


def _cuda_interface(array: object) -> CudaInterface | None:
    """The CUDA array interface of `array`, if it has one. It has no name for bf16 ("V2"), as which DLPack describes it."""
    interface: CudaInterface | None = getattr(array, "__cuda_array_interface__", None)
    is_nameless = interface is not None and np.dtype(interface["typestr"]).kind == "V"
    return None if is_nameless and hasattr(array, "__dlpack__") else interface


def _of_cuda_interface(array: object, interface: CudaInterface, name: str, dtypes: Collection[str]) -> ArrayView:
    if interface.get("mask") is not None:
        raise ArgumentTypeError(f"`{name}` is a masked array, and kernels do not read its mask; pass its elements alone")
    element = np.dtype(interface["typestr"])
    dtype = _BY_NUMPY.get(element)
    if dtype is None:
        raise _unknown_dtype(name, str(element), dtypes)
    shape = tuple(interface["shape"])
    steps = interface.get("strides")
    strides = contiguous_strides(shape) if steps is None else _in_elements(steps, element.itemsize, name)
    device = getattr(array, "device", None)
    ordinal = int(getattr(device, "id", 0) or 0)
    pointer, read_only = interface["data"]
    return ArrayView(name, pointer, shape, strides, dtype, Location("cuda", ordinal), array, not read_only)


# DLPack (dlpack.h, version 0): a capsule "dltensor" holding a DLManagedTensor whose first member is a DLTensor.
class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DLPACK_DTYPES = {
    (0, 32): "int32", (0, 64): "int64", (2, 16): "fp16", (2, 32): "fp32", (4, 16): "bf16", (6, 8): "bool",
    (10, 8): "fp8_e4m3", (12, 8): "fp8_e5m2",
}  # fmt: skip
DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}


class HasDLPack(Protocol):
    def __dlpack__(self) -> object: ...


def _of_dlpack(array: HasDLPack, name: str, dtypes: Collection[str]) -> ArrayView:
    capsule = array.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    known = DLPACK_DTYPES.get((tensor.code, tensor.bits))
    if known is None or tensor.lanes != 1:
        raise _unknown_dtype(name, f"DLPack type {tensor.code} of {tensor.bits} bits", dtypes)
    kind = DLPACK_DEVICES.get(tensor.device_type)
    if kind is None:
        raise ArgumentError(f"`{name}` is on a device that is neither the CPU nor CUDA")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    location = CPU if kind == "cpu" else Location("cuda", tensor.device_id)
    address = (tensor.data or 0) + tensor.byte_offset
    return ArrayView(name, address, shape, strides, DTYPES[known], location, array, keep=capsule)


def check_one_device(name: str, device: object, other: str, its_device: object) -> None:
    """Raises ArgumentError if two arguments are on different devices."""
    if device != its_device:
        raise ArgumentError(f"`{name}` is on {device} and `{other}` on {its_device}; move them to one device")


def _in_elements(steps: Sequence[int], itemsize: int, name: str) -> tuple[int, ...]:
    """Strides in bytes -> strides in elements."""
    if any(step % itemsize for step in steps):
        raise ArgumentError(f"`{name}` has strides of {tuple(steps)} bytes, not whole elements; pass a copy")
    return tuple(step // itemsize for step in steps)


def _unknown_dtype(name: str, dtype: str, expected: Collection[str]) -> ArgumentTypeError:
    several = "one of " if len(expected) > 1 else ""
    return ArgumentTypeError(f"`{name}` has elements of {dtype}; expected {several}{', '.join(expected)}")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous array."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def has_heads_inside(strides: Sequence[int]) -> bool:
    """Whether an array [batch, heads, length, size] lies in memory as [batch, length, heads, size]."""
    return bool(strides[1] < strides[2])


def empty_like(array: ArrayView, shape: tuple[int, ...], dtype: DType, name: str, heads_inside: bool = False) -> ArrayView:
    """An uninitialized array of the library of `array`, on its device: contiguous, or as `has_heads_inside` says. If `array` is
    of the same `dtype`, it has the library's own type for it that `array` has. On the CPU it is full of NaN, so that an element
    that a kernel does not write is noticed.

    Memory that belongs to no library has an owner with a method `empty_view`(shape, dtype, name), which gives the array.

    Raises ArgumentError if the library cannot be told, or lacks the element type.
    """
    if (made_by_owner := getattr(array.owner, "empty_view", None)) is not None:
        found: ArrayView = made_by_owner(shape, dtype, name)
        return found
    if heads_inside and _numba_of(array.owner) is None:  # numba's arrays of four dimensions cannot be transposed
        batch, heads, length, size = shape
        made = _empty(array, (batch, length, heads, size), dtype).swapaxes(1, 2)
    else:
        made = _empty(array, shape, dtype)
    return view(made, name)


def _numba_of(owner: object) -> Any:
    """numba's module of CUDA if `owner` is one of its arrays, else None."""
    return sys.modules.get("numba.cuda") if type(owner).__module__.startswith("numba.cuda.") else None


def add_columns(array: Any, part: Any, begin: int, end: int) -> None:
    """Adds `part` to the columns of an array of the same library and type, in place."""
    columns = array[..., begin:end]
    if not isinstance(array, np.ndarray):
        columns += part
        return
    storage = view(array, "k").dtype
    columns[...] = round_to_storage(from_storage(columns) + from_storage(part), storage).view(array.dtype)


NAN_BYTE = 0xFF  # a number of such bytes is NaN in every type


def _empty(array: ArrayView, shape: tuple[int, ...], dtype: DType) -> Any:
    owner, torch, cupy = array.owner, sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(owner, torch.Tensor):
        made = torch.empty(shape, dtype=getattr(torch, dtype.torch), device=owner.device)
        if array.location == CPU:
            made.view(-1).view(torch.uint8).fill_(NAN_BYTE)
        return made
    if array.location == CPU:
        theirs = getattr(owner, "dtype", None)  # the owner's: of ml_dtypes, for bf16 of numpy and JAX, or the structured one
        of_owner = isinstance(theirs, np.dtype) and _BY_NAME.get(theirs.name) is dtype
        made = np.empty(shape, theirs if of_owner else dtype.numpy)
        made.reshape(-1).view(np.uint8)[...] = NAN_BYTE
        return made
    numba = _numba_of(owner)
    if cupy is None and numba is None:
        kind = type(owner).__name__
        raise ArgumentError(f"cannot allocate memory for a {kind}; pass `out`, or arrays of torch, CuPy or numba")
    if dtype.name == "bf16":
        raise ArgumentError(f"{'CuPy' if numba is None else 'numba'} has no bf16 to allocate the output in; pass `out`")
    if numba is not None:
        with numba.gpus[array.location.ordinal]:
            return numba.device_array(shape, dtype.numpy)
    assert cupy is not None
    with cupy.cuda.Device(array.location.ordinal):
        return cupy.empty(shape, dtype.numpy)


def current_stream(array: ArrayView) -> int | None:
    """The driver's handle of the stream on which the array is ready: the current one of torch or CuPy, or the one that its CUDA
    array interface names. None, the default stream, for arrays of DLPack, and on the CPU."""
    if array.location == CPU:
        return None
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array.owner, torch.Tensor):
        return int(torch.cuda.current_stream(array.location.ordinal).cuda_stream)
    if cupy is not None and isinstance(array.owner, cupy.ndarray):
        return int(cupy.cuda.get_current_stream().ptr)
    stream: int | None = getattr(array.owner, "__cuda_array_interface__", {}).get("stream")
    return stream
