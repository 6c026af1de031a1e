"""The sizes of a call's dimensions, from its arrays, which are checked against the tensors of the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attngen.device.arrays import ArgumentError, ArgumentTypeError, ArrayView, check_one_device
from attngen.device.overlap import overlaps_itself
from attngen.diagnostics import counted
from attngen.emit.program import Axis, OneMore, Program, Tensor, evaluate
from attngen.spec.attention import CU_SEQLENS, PAGES
from attngen.spec.expr import MAX_LENGTH


def measure(program: Program, arrays: Mapping[str, ArrayView]) -> dict[str, int]:
    """The size of every named dimension; `arrays` are those of the call, by the keys of the program's tensors.

    Raises ArgumentError that names the array, what it is and what was expected.
    """
    given = [(tensor, arrays[tensor.key]) for tensor in program.tensors if tensor.key in arrays]
    for tensor, array in given:
        _check_kind(tensor, array)
    sizes = _sizes(given)
    for tensor, array in given:
        if tensor.like and array.shape != arrays[tensor.like].shape:
            expected = _shape(arrays[tensor.like].shape)
            raise ArgumentError(f"`{array.name}` is {_shape(array.shape)}; expected the shape of `{tensor.like}`, {expected}")
    for tensor in program.tensors:
        if tensor.like and not tensor.broadcasts:
            has, pairs = arrays[tensor.like].shape, tuple([evaluate(axis.size, sizes) for axis in tensor.axes])
            if has != pairs:
                raise ArgumentError(
                    f"`{tensor.like}` is {_shape(has)}; this kernel computes the gradient of a tensor with one element for "
                    f"each pair, {_shape(pairs)}. Use kernel fused, or auto"
                )
    _, first = given[0]
    for _, array in given:
        check_one_device(first.name, first.location, array.name, array.location)
    copies_rows = any(tensor.key == "v" and tensor.unit_stride for tensor in program.tensors)
    for tensor, array in given:
        for mistake in _layout_mistakes(tensor, array, ", or use kernel tiled" if copies_rows and tensor.alignment else ""):
            raise ArgumentError(mistake)
    return sizes


def _sizes(given: Iterable[tuple[Tensor, ArrayView]]) -> dict[str, int]:
    """The sizes that the first array with each dimension states, and all others must have."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}  # the array that states a size
    for tensor, array in sorted(given, key=lambda pair: pair[0].broadcasts):
        for position, (axis, size) in enumerate(zip(tensor.axes, array.shape, strict=True)):
            if isinstance(axis.size, OneMore) and not size:
                raise ArgumentError(
                    f"`{array.name}` is [0]; expected at least one number: where sequences begin and the last ends"
                )
            if isinstance(axis.size, OneMore) and axis.size.size not in sizes:
                origin[axis.size.size] = array.name
                sizes[axis.size.size] = size - 1
            if axis.is_free and axis.name not in sizes:
                if size > MAX_LENGTH:
                    raise ArgumentError(f"`{array.name}` has {size} elements in dimension {position}; at most {MAX_LENGTH}")
                origin[axis.name] = array.name
                sizes[axis.name] = size
            wanted = evaluate(axis.size, sizes)
            if size != wanted and not (size == 1 and axis.is_free and tensor.broadcasts):
                raise ArgumentError(_wrong_size(array, position, axis, wanted, origin))
            if axis.name:
                sizes[axis.name] = wanted
    return sizes


def _check_kind(tensor: Tensor, array: ArrayView) -> None:
    if len(array.shape) != len(tensor.shape):
        raise ArgumentError(
            f"`{array.name}` has {counted(len(array.shape), 'dimension')}, {_shape(array.shape)}; "
            f"expected {len(tensor.shape)}: {_shape(tensor.shape)}"
        )
    if array.dtype.name != tensor.dtype:
        is_fixed = tensor.key in (*CU_SEQLENS, *PAGES, "lse", "dlse")  # the spec does not state its type
        stated = f"declare `{array.name}` as {array.dtype}" if tensor.broadcasts else f"write dtype {array.dtype}"
        cure = "Convert it" if is_fixed else f"Convert it, or {stated} in the spec"
        raise ArgumentTypeError(f"`{array.name}` has elements of {array.dtype}; expected {tensor.dtype}. {cure}")


def _layout_mistakes(tensor: Tensor, array: ArrayView, alternative: str) -> Iterator[str]:
    """What the program's kernels cannot read or write of the array's memory. `alternative` to a copy: another kernel, or ""."""
    if 0 in array.shape:
        return
    if tensor.unit_stride and array.shape[-1] > 1 and array.strides[-1] != 1:
        yield (
            f"`{array.name}` has stride {array.strides[-1]} in its last dimension; this kernel copies whole rows and "
            f"requires 1. Pass a contiguous copy{alternative}"
        )
    align = tensor.alignment
    if align and array.pointer % align:
        yield (
            f"`{array.name}` starts at an address that is not a multiple of {align} bytes, which this kernel's copies require. "
            f"Pass a copy{alternative}"
        )
    for axis, (size, stride) in enumerate(zip(array.shape[:-1], array.strides[:-1], strict=True)):
        if align and size > 1 and stride * array.dtype.bytes % align:
            yield (
                f"`{array.name}` has stride {stride} in dimension {axis}, {stride * array.dtype.bytes} bytes; this kernel's "
                f"copies require a multiple of {align} bytes. Pass a contiguous copy{alternative}"
            )
    if tensor.is_written and not array.writable:
        yield f"`{array.name}` is read-only and cannot be written. Pass a copy"
    if tensor.is_written and overlaps_itself(array):
        yield f"elements of `{array.name}` share memory, so it cannot be an output. Pass a contiguous array"


def _wrong_size(array: ArrayView, position: int, axis: Axis, wanted: int, origin: Mapping[str, str]) -> str:
    source = f" as in `{origin[axis.name]}`" if axis.name in origin else ""
    return (
        f"`{array.name}` is {_shape(array.shape)}: dimension {position} is {array.shape[position]}, expected "
        f"{axis.name or 'size'} = {wanted}{source}"
    )


def _shape(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
