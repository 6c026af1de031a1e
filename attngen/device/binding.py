"""A Program and the arrays of one call -> the launches with all arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attngen.device.arrays import (
    ArgumentError,
    ArrayView,
    contiguous_strides,
    current_stream,
    empty_like,
    has_heads_inside,
)
from attngen.device.overlap import OverlapCheck, byte_range
from attngen.device.params import Number
from attngen.device.protocol import Argument, CTypesScalar, Device, Kernel, Launch, Memory
from attngen.device.sizes import NO_LENGTHS, Lengths, measure
from attngen.device.tensor_map import MappedTensor, TensorMap, TensorMapError
from attngen.emit.program import MULTIPROCESSORS, PACKED_ROWS, KernelEntry, Parameter, Program, Sizes, Tensor, evaluate
from attngen.spec.dtypes import DTYPES

CTYPES: dict[str, type[CTypesScalar]] = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
}
ROW_BYTES = 128  # per row of a swizzled TMA box
ROWS_AND_KEYS = ("q", "k", "v", "dout")  # arguments of which a call without pairs has no element
ANY_SIZE = 2**31 - 2**16  # size of a tensor map's dimension that bounds nothing
MAX_GRID = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True)
class Bound:
    """One call of a kernel, checked and ready to run. `arrays` holds all of its tensors, by their keys."""

    kernel: Kernel
    launches: tuple[Launch, ...]
    arrays: Mapping[str, ArrayView]
    overlap: OverlapCheck | None  # checks inputs and outputs, in this order; None if the call allocated every output

    @property
    def memory(self) -> tuple[Memory, ...]:
        """What launches may read and write. Calls that are repeated with other addresses never need it."""
        return tuple([_memory(tensor, self.arrays[tensor.key]) for tensor in self.kernel.source.tensors])

    @property
    def outputs(self) -> dict[str, Any]:
        """The results, as arrays of the caller's library, by the names of their arguments."""
        return {t.argument: self.arrays[t.key].owner for t in self.kernel.source.of_role("output")}

    def run(self, stream: int | None = None) -> None:
        """Launches on the driver's `stream`, by default the current one of the arrays' library. Raises ArgumentError if an
        output shares memory with another array."""
        callers = [self.arrays[t.key] for t in callers_tensors(self.kernel.source)]
        if self.overlap is not None:
            self.overlap.check([array.pointer for array in callers])
        if self.launches:
            self.kernel.launch(self.launches, self.memory, current_stream(callers[0]) if stream is None else stream)


def callers_tensors(program: Program) -> tuple[Tensor, ...]:
    """The inputs, then the outputs."""
    return program.of_role("input") + program.of_role("output")


def sizes_of(
    program: Program, device: Device, arrays: Mapping[str, ArrayView], longest: Lengths = NO_LENGTHS
) -> dict[str, int]:
    """The sizes of a call on `device` with these inputs and outputs, by name; see `measure`. Raises ArgumentError."""
    sizes = measure(program, arrays, longest)
    wanted = device.name if device.name.startswith("cuda") else "cpu"
    first = arrays[program.of_role("input")[0].key]
    if str(first.location) != wanted:
        raise ArgumentError(
            f"`{first.name}` is on {first.location}, and this kernel was compiled for the {device.name} device; "
            f"move the arrays to {wanted}, or compile for the other device"
        )
    return sizes | {MULTIPROCESSORS: device.multiprocessors}


def bind(kernel: Kernel, sizes: Sizes, given: Mapping[str, ArrayView], params: Mapping[str, Number]) -> Bound:
    """A call with arrays that `measure` has checked; what is not given is allocated.

    Raises ArgumentError if a grid is larger than CUDA allows, or a stride is larger than the kernel's own type for it.
    """
    program = kernel.source
    arrays = {key: _strided(array) for key, array in given.items()}
    for tensor in program.tensors:
        if tensor.key not in arrays:
            arrays[tensor.key] = _strided(_allocate(program, tensor, sizes, given))
    tensors = {t.name: (t, arrays[t.key]) for t in program.tensors}
    launches = [_launch(entry, tensors, sizes, params) for entry in program.kernels]
    overlap = None
    if any(t.key in given for t in program.of_role("output")):
        callers = callers_tensors(program)
        outputs = [i for i, t in enumerate(callers) if t.role == "output"]
        overlap = OverlapCheck([arrays[t.key] for t in callers], outputs)
    return Bound(kernel, tuple([launch for launch in launches if launch is not None]), arrays, overlap)


def _strided(array: ArrayView) -> ArrayView:
    """`array` with strides that kernels can compute with: to one without elements libraries give any strides, 0 too."""
    return replace(array, strides=contiguous_strides(array.shape)) if 0 in array.shape else array


def _allocate(program: Program, tensor: Tensor, sizes: Sizes, given: Mapping[str, ArrayView]) -> ArrayView:
    """An array for an output or a workspace. An output lies in memory as the first input with all of its axes but the last."""
    of_like = given[tensor.like].shape if tensor.like else ()
    shape = (*of_like, *(evaluate(axis.size, sizes) for axis in tensor.axes[len(of_like) :]))
    if tensor.unless and _is_spared(tensor, given[tensor.unless_of].shape, sizes):
        shape = (0,) * len(shape)
    heads_inside = False
    if tensor.role == "output" and len(shape) == 4 and not tensor.like:
        same = [t for t in program.tensors if t.role == "input" and t.axes[:-1] == tensor.axes[:-1]]
        heads_inside = bool(same) and has_heads_inside(given[same[0].key].strides)
    alike = given[tensor.like] if tensor.like else next(iter(given.values()))
    return empty_like(alike, shape, DTYPES[tensor.dtype], tensor.key, heads_inside)


def _is_spared(workspace: Tensor, shape: tuple[int, ...], sizes: Sizes) -> bool:
    """Whether a call does not need `workspace`: an array of this shape has an element for each of the workspace's."""
    others = {axis.name for axis in workspace.axes} - {*workspace.unless}
    return shape == tuple([sizes[n] for n in workspace.unless]) and all(sizes[n] == 1 for n in others)


Bindable = tuple[Tensor, ArrayView]


def _launch(entry: KernelEntry, tensors: Mapping[str, Bindable], sizes: Sizes, params: Mapping[str, Number]) -> Launch | None:
    """The launch of one kernel; None if its grid has no block."""
    of_grid = _sizes_of_grid(entry, tensors, sizes)
    whole = [component.whole(of_grid) for component in entry.grid]
    if any(n > most for n, most in zip(whole, MAX_GRID, strict=True)):
        raise ArgumentError(
            f"{entry.name} would need a grid of {whole} blocks; CUDA has at most {list(MAX_GRID)}. Split the call over batch "
            "or heads"
        )
    if 0 in whole:
        return None
    x, y, z = (component(of_grid) for component in entry.grid)
    return Launch(entry, (x, y, z), tuple([_argument(p, tensors, sizes, params) for p in entry.parameters]))


def _sizes_of_grid(entry: KernelEntry, tensors: Mapping[str, Bindable], sizes: Sizes) -> Sizes:
    """The sizes that a grid follows from. A kernel that is given the extents of an array and reads no rows or keys has threads
    for the array's elements: 1 along a dimension in which it is broadcast, though the call may have none or many, and all of
    an array that is longer than any sequence."""
    if any(p.binding == "data" and tensors[p.of][0].argument in ROWS_AND_KEYS for p in entry.parameters):
        return sizes
    own: dict[str, int] = {}
    for p in entry.parameters:
        if p.binding == "extent":
            tensor, array = tensors[p.of]
            name = tensor.axes[p.dim].name
            own[name] = max(array.shape[p.dim], own.get(name, 0))
    return {**sizes, **own}


def _argument(parameter: Parameter, tensors: Mapping[str, Bindable], sizes: Sizes, params: Mapping[str, Number]) -> Argument:
    match parameter.binding:
        case "stride":
            return ctypes.c_longlong(_stride(*tensors[parameter.of], parameter.dim))
        case "extent":
            return ctypes.c_int(tensors[parameter.of][1].shape[parameter.dim])
        case "data":
            return ctypes.c_void_p(tensors[parameter.of][1].pointer)
        case "size":
            return ctypes.c_int(sizes[parameter.of])
        case "map":
            return _tensor_map(tensors[parameter.of][1], parameter.dim)
        case "packed_map":
            return _packed_map(tensors[parameter.of][1], parameter.dim)
        case "paged_map":
            return _paged_map(tensors[parameter.of][1], parameter.dim)
        case "step":
            return _step(*tensors[parameter.of], parameter)
        case "param":
            return CTYPES[parameter.ctype](params[parameter.of])
        case "section" | "splits" | "parts":
            assert parameter.formula is not None
            return ctypes.c_int(parameter.formula(sizes))


def _step(tensor: Tensor, array: ArrayView, parameter: Parameter) -> Argument:
    """The stride in bytes. Raises ArgumentError if the parameter's type does not hold it."""
    step = _stride(tensor, array, parameter.dim) * array.dtype.bytes
    if parameter.ctype == "int" and not -(2**31) <= step < 2**31:
        raise ArgumentError(
            f"`{array.name}` has a stride of {step} bytes in dimension {parameter.dim}; this kernel takes at most {2**31 - 1} "
            "there. Pass a contiguous copy"
        )
    return CTYPES[parameter.ctype](step)


def _stride(tensor: Tensor, array: ArrayView, axis: int) -> int:
    """The stride to index with: 0 in a dimension of size 1 that may broadcast, in which the array's own may be any number."""
    return 0 if tensor.broadcasts and array.shape[axis] == 1 else array.strides[axis]


def _tensor_map(array: ArrayView, rows: int) -> MappedTensor:
    """An array [..., row, element] as TMA sees it, in boxes of `rows` rows. Raises TensorMapError if it cannot."""
    size = array.dtype.bytes
    sizes = tuple(max(n, 1) for n in reversed(array.shape))  # nothing is copied of an empty tensor
    outer = zip(array.shape[-2::-1], array.strides[-2::-1], strict=True)
    steps = [stride * size if n > 1 else ROW_BYTES for n, stride in outer]
    box = (ROW_BYTES // size, rows, *(1 for _ in sizes[2:]))
    described = TensorMap(array.name, array.dtype.name, sizes, tuple(steps), box)
    described.check_address(array.pointer)
    return MappedTensor(described, array.pointer)


def _packed_map(array: ArrayView, rows: int) -> MappedTensor:
    """An array [total, head, element] of packed rows, as `Parameter` describes it. Raises TensorMapError if TMA cannot."""
    row, head = (stride if n > 1 else 0 for n, stride in zip(array.shape[:2], array.strides[:2], strict=True))
    return _map_of_sequences(array, row, head, rows)


def _paged_map(array: ArrayView, rows: int) -> MappedTensor:
    """The same of pages or padded keys, [page or batch, head, row, element]. Raises TensorMapError if TMA cannot."""
    pages, heads = array.shape[:2]
    page, head, row, _ = array.strides
    if row == 0 or (pages > 1 and (page % row or page // row * pages >= ANY_SIZE)):
        raise TensorMapError(
            f"`{array.name}` has a stride of {page} elements in its first dimension and {row} between rows; TMA "
            f"requires a multiple of the latter, and at most {ANY_SIZE} rows in all. Use kernel fused"
        )
    return _map_of_sequences(array, row, head if heads > 1 else 0, rows)


def _map_of_sequences(array: ArrayView, row: int, head: int, rows: int) -> MappedTensor:
    """Any rows of `array` as those of sequences, by the strides of rows and heads in elements, 0 if there is one."""
    size, heads, columns = array.dtype.bytes, max(array.shape[1], 1), max(array.shape[-1], 1)
    row, head = (stride * size or ROW_BYTES for stride in (row, head))
    sizes = (columns, PACKED_ROWS, heads, ANY_SIZE, ANY_SIZE)
    box = (ROW_BYTES // size, rows, 1, 1, 1)
    described = TensorMap(array.name, array.dtype.name, sizes, (row, head, row, 2**34 * size - row), box)
    described.check_address(array.pointer)
    return MappedTensor(described, array.pointer)


def _memory(tensor: Tensor, array: ArrayView) -> Memory:
    """The smallest range that holds every element."""
    low, high = byte_range(array)
    return Memory(tensor.name, array.pointer + low, high - low, tensor.is_written, tensor.role == "counter", array)
