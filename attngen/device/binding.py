"""`KernelSource` and the arrays of one call -> the sizes, and the launches with all arguments."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from attngen.device.arrays import ArgumentError, ArgumentTypeError, ArrayView, contiguous_strides, dimensions
from attngen.device.overlap import byte_range, overlaps_itself, share_memory
from attngen.device.protocol import Argument, CTypesScalar, Launch, Memory
from attngen.device.tensor_map import MappedTensor, TensorMap
from attngen.emit.kernel_source import Extent, KernelSource, Parameter, TensorSpec, evaluate_extent
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import MAX_FLOAT, MAX_INT_PARAM, MAX_LENGTH

Number = int | float

CTYPES: dict[str, type[Any]] = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
}
ROW_BYTES = 128  # of a swizzled TMA box
MAX_GRID = (2**31 - 1, 65535, 65535)


def measure(source: KernelSource, arrays: Mapping[str, ArrayView]) -> dict[str, int]:
    """The size of every named dimension; checks each array against its TensorSpec.

    Raises ArgumentError that names the array, what it is and what was expected.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    given = [(spec, arrays[spec.name]) for spec in source.tensors if spec.name in arrays]
    for spec, array in given:
        _check_kind(spec, array)
    for spec, array in sorted(given, key=lambda pair: _broadcasts(pair[0])):
        for axis, (extent, size) in enumerate(zip(spec.shape, array.shape, strict=True)):
            if isinstance(extent, str) and extent not in sizes:
                if size > MAX_LENGTH:
                    raise ArgumentError(f"`{array.name}` has {size} elements in dimension {axis}; at most {MAX_LENGTH}")
                sizes[extent], origin[extent] = size, array.name
            wanted = evaluate_extent(extent, sizes)
            if size != wanted and not (size == 1 and isinstance(extent, str) and _broadcasts(spec)):
                raise ArgumentError(_wrong_size(spec, array, axis, extent, wanted, origin))
    check_heads(sizes)
    q = arrays["Q"]
    for _, array in given:
        if array.location != q.location:
            raise ArgumentError(f"`q` is on {q.location} and `{array.name}` on {array.location}; move them to one place")
    for spec, array in given:
        _check_layout(spec, array)
    sizes.setdefault("q_heads", arrays["Q"].shape[1])  # head counts that the spec fixes are numbers in the shapes
    sizes.setdefault("kv_heads", arrays["K"].shape[1])
    return sizes


BROADCAST_NEVER = frozenset("QKVO") | {"lse"}


def _broadcasts(spec: TensorSpec) -> bool:
    """Captured tensors of size 1 in a named dimension are broadcast over it; Q, K, V and outputs are not."""
    return spec.name not in BROADCAST_NEVER and spec.role == "input"


def _check_kind(spec: TensorSpec, array: ArrayView) -> None:
    if len(array.shape) != len(spec.shape):
        raise ArgumentError(
            f"`{array.name}` has {dimensions(len(array.shape))}, {_shape(array.shape)}; "
            f"expected {len(spec.shape)}: {_shape(spec.shape)}"
        )
    if array.dtype.name != spec.dtype:
        raise ArgumentTypeError(
            f"`{array.name}` has elements of {array.dtype}; expected {spec.dtype}. Convert it, or write dtype {array.dtype} "
            "in the spec"
        )


def check_heads(sizes: Mapping[str, int]) -> None:
    """Raises ArgumentError if the query heads are not a multiple of the key/value heads."""
    q_heads, kv_heads = sizes.get("q_heads"), sizes.get("kv_heads")
    if q_heads is None or kv_heads is None or q_heads == 0:
        return
    if kv_heads == 0 or q_heads % kv_heads:
        raise ArgumentError(f"{q_heads} query heads of `q` cannot share {kv_heads} key/value heads of `k`")


def _check_layout(spec: TensorSpec, array: ArrayView) -> None:
    if 0 in array.shape:
        return
    if spec.unit_stride and array.shape[-1] > 1 and array.strides[-1] != 1:
        raise ArgumentError(
            f"`{array.name}` has stride {array.strides[-1]} in its last dimension; this kernel copies whole rows and "
            f"requires 1. Pass a contiguous copy, or use kernel tiled"
        )
    align = spec.alignment
    if align and array.pointer % align:
        raise ArgumentError(
            f"`{array.name}` starts at an address that is not a multiple of {align} bytes, which this kernel's copies require. "
            "Pass a copy, or use kernel tiled"
        )
    for axis, (size, stride) in enumerate(zip(array.shape[:-1], array.strides[:-1], strict=True)):
        if align and size > 1 and stride * array.dtype.bytes % align:
            raise ArgumentError(
                f"`{array.name}` has stride {stride} in dimension {axis}, {stride * array.dtype.bytes} bytes; this kernel's "
                f"copies require a multiple of {align} bytes. Pass a contiguous copy, or use kernel tiled"
            )
    if spec.role == "output" and not array.writable:
        raise ArgumentError(f"`{array.name}` is read-only and cannot be written. Pass a copy")
    if spec.role == "output" and overlaps_itself(array):
        raise ArgumentError(f"elements of `{array.name}` share memory, so it cannot be an output. Pass a contiguous array")


def _wrong_size(spec: TensorSpec, array: ArrayView, axis: int, extent: Extent, wanted: int, origin: Mapping[str, str]) -> str:
    source = f" as in `{origin[extent]}`" if isinstance(extent, str) and extent in origin else ""
    return (
        f"`{array.name}` is {_shape(array.shape)}: dimension {axis} is {array.shape[axis]}, expected "
        f"{extent if isinstance(extent, str) else 'size'} = {wanted}{source}"
    )


def _shape(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def shapes_to_allocate(source: KernelSource, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every output and workspace."""
    return {t.name: tuple(evaluate_extent(e, sizes) for e in t.shape) for t in source.tensors if t.role != "input"}


@dataclass(frozen=True, slots=True)
class Bound:
    """What a kernel needs for one call."""

    launches: tuple[Launch, ...]
    memory: tuple[Memory, ...]


def bind(source: KernelSource, arrays: Mapping[str, ArrayView], sizes: dict[str, int], params: Mapping[str, Number]) -> Bound:
    """Every entry point with its grid and arguments. `arrays` holds all tensors, workspaces included.

    Raises ArgumentError where a grid is larger than CUDA allows, or a stride is larger than the kernel's own type for it.
    """
    strides = {spec.name: _effective_strides(spec, arrays[spec.name]) for spec in source.tensors}

    def argument(parameter: Parameter) -> Argument:
        match parameter.binding:
            case "data":
                return ctypes.c_void_p(arrays[parameter.of].pointer)
            case "map":
                return _tensor_map(arrays[parameter.of], parameter)
            case "stride":
                return ctypes.c_longlong(strides[parameter.of][parameter.dim])
            case "step":
                step = strides[parameter.of][parameter.dim] * arrays[parameter.of].dtype.bytes
                if parameter.ctype == "int" and not -(2**31) <= step < 2**31:
                    raise ArgumentError(
                        f"`{arrays[parameter.of].name}` has a stride of {step} bytes in dimension {parameter.dim}; this kernel "
                        f"takes at most {2**31 - 1} there. Pass a contiguous copy"
                    )
                return CTYPES[parameter.ctype](step)  # type: ignore[no-any-return]
            case "size":
                return ctypes.c_int(sizes[parameter.of])
            case "section":
                assert parameter.sections is not None
                return ctypes.c_int(parameter.sections(sizes))
            case "param":
                scalar: CTypesScalar = CTYPES[parameter.ctype](params[parameter.of])
                return scalar

    launches = []
    for entry in source.entry_points:
        grid = tuple(component(sizes) for component in entry.grid)
        whole = tuple(replace(component, at_most="")(sizes) for component in entry.grid)
        if any(n > most for n, most in zip(whole, MAX_GRID, strict=True)):
            raise ArgumentError(
                f"{entry.name} would need a grid of {_shape(whole)} blocks; CUDA has at most {_shape(MAX_GRID)}. "
                "Split the call over batch or heads"
            )
        if 0 not in grid:
            x, y, z = grid
            launches.append(Launch(entry, (x, y, z), tuple(argument(p) for p in entry.parameters)))
    memory = tuple(_memory(spec, arrays[spec.name]) for spec in source.tensors)
    return Bound(tuple(launches), memory)


def _tensor_map(array: ArrayView, parameter: Parameter) -> MappedTensor:
    """A [batch, head, row, element] array as TMA sees it. Raises TensorMapError if it cannot."""
    size = array.dtype.bytes
    batch, heads, rows, width = (max(n, 1) for n in array.shape)  # nothing is copied of an empty tensor
    steps = [stride * size if n > 1 else ROW_BYTES for n, stride in zip(array.shape[2::-1], array.strides[2::-1], strict=True)]
    box = (ROW_BYTES // size, parameter.dim, 1, 1)
    described = TensorMap(array.name, array.dtype.name, (width, rows, heads, batch), tuple(steps), box)
    described.check_address(array.pointer)
    return MappedTensor(described, array.pointer)


OUTPUTS = frozenset(("out", "lse"))
MOST_DISTANCES = 256  # remembered per call signature


class Apart:
    """Checks that outputs share no element with another array of the call: a block would read what others have written.

    Views that interleave without sharing an element, as the parts of a packed projection do, pass.
    """

    def __init__(self, arrays: Sequence[ArrayView]) -> None:
        self._arrays = [replace(array, owner=None) for array in arrays]  # remembered calls must not keep arrays alive
        outputs = [i for i, array in enumerate(arrays) if array.name in OUTPUTS]
        self._pairs = [(i, j) for i in outputs for j in range(len(arrays)) if j != i]
        self._ranges = [byte_range(array) for array in arrays]
        self._interleaved: set[tuple[int, int, int]] = set()  # (i, j, distance in bytes) that share no element

    def check(self, addresses: Sequence[int]) -> None:
        """Raises ArgumentError if an output shares memory with another array. `addresses` are those of the arrays."""
        for i, j in self._pairs:
            (low, high), (other_low, other_high) = self._ranges[i], self._ranges[j]
            distance = addresses[j] - addresses[i]
            if low < distance + other_high and distance + other_low < high and (i, j, distance) not in self._interleaved:
                if share_memory(self._arrays[i], self._arrays[j], distance):
                    raise ArgumentError(
                        f"`{self._arrays[i].name}` and `{self._arrays[j].name}` share memory; pass an output of its own"
                    )
                if len(self._interleaved) >= MOST_DISTANCES:
                    self._interleaved.clear()
                self._interleaved.add((i, j, distance))


def _effective_strides(spec: TensorSpec, array: ArrayView) -> tuple[int, ...]:
    """The strides to index with: 0 in a dimension of size 1, which may be broadcast, and whose own stride may be any number."""
    if not _broadcasts(spec):
        return array.strides
    return tuple(0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True))


def _memory(spec: TensorSpec, array: ArrayView) -> Memory:
    """The smallest range that holds every element."""
    if 0 in array.shape:
        return Memory(spec.name, array.pointer, 0, spec.role != "input")
    low, high = byte_range(array)
    return Memory(spec.name, array.pointer + low, high - low, spec.role != "input", spec.role == "counter")


def check_params(source_params: Mapping[str, tuple[str, Number | None]], given: Mapping[str, Any]) -> dict[str, Number]:
    """Every param's value: the given one, else its default. `source_params` maps names to (type, default).

    Raises ArgumentError for a param that is missing, of the wrong type or out of range.
    """
    values: dict[str, Number] = {}
    for name, (kind, default) in source_params.items():
        value = given.get(name, default)
        if value is None:
            raise ArgumentError(f"param `{name}` has no default and was not given; pass {name}=...")
        if not isinstance(value, (int, float)):  # numpy's numbers
            value = int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind == "int" and not isinstance(value, int)):
            raise ArgumentTypeError(f"param `{name}` is {value!r}; expected {'an int' if kind == 'int' else 'a number'}")
        limit = MAX_INT_PARAM if kind == "int" else MAX_FLOAT
        if abs(value) > limit and value not in INFINITIES:
            raise ArgumentError(f"param `{name}` is {_shown(value)}; expected at most {limit} in magnitude")
        values[name] = value
    return values


INFINITIES = (math.inf, -math.inf)


def _shown(value: Number) -> str:
    """A number in at most about 40 characters."""
    return str(value) if isinstance(value, float) or abs(value) < 10**40 else "a number of more than 40 digits"


def refuse_unknown(names: list[str], known: list[str]) -> None:
    """Raises ArgumentError for the first name that is not in `known`."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ArgumentError(f"this attention has no input or param `{name}`; {hint}")


__all__ = [
    "DTYPES",
    "Bound",
    "bind",
    "check_params",
    "contiguous_strides",
    "measure",
    "refuse_unknown",
    "shapes_to_allocate",
]
