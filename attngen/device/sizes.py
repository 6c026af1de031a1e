"""The sizes of a call's dimensions, from its arrays, which are checked against the tensors of the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from attngen.device.arrays import ArgumentError, ArgumentTypeError, ArrayView, check_one_device
from attngen.device.overlap import overlaps_itself
from attngen.diagnostics import counted
from attngen.emit.program import Axis, OneMore, Program, Sizes, Tensor, evaluate
from attngen.plan.formulas import smaller
from attngen.spec.attention import CU_SEQLENS, LONGEST, PAGES
from attngen.spec.expr import MAX_LENGTH

Pair = tuple[Tensor, ArrayView]
Lengths = Mapping[str, int | float]
NO_LENGTHS: Lengths = MappingProxyType({})


def measure(program: Program, arrays: Mapping[str, ArrayView], longest: Lengths = NO_LENGTHS) -> dict[str, int]:
    """The size of every named dimension; `arrays` are those of the call, by the keys of the program's tensors. `longest` has
    the lengths that no sequence exceeds, by the names of LONGEST, in storages whose calls state them.

    q_len and kv_len are the lengths of the longest sequence that the call may have. Arrays of rows or keys with such a
    dimension state it, and `longest` may limit the keys of padded arrays further. Without such an array `longest` states it,
    for keys in pages at most what the page table has room for.

    Along each dimension a captured tensor has as many elements as other arrays, or 1 for all. Along a length that no array of
    rows or keys states, it may have more.

    Raises ArgumentError that names the array, what it is and what was expected.
    """
    given = [(tensor, arrays[tensor.key]) for tensor in program.tensors if tensor.key in arrays]
    for tensor, array in given:
        _check_kind(tensor, array)
    sizes = _sizes([pair for pair in given if not pair[0].like], longest)
    for tensor, array in given:
        if tensor.like and array.shape != arrays[tensor.like].shape:
            expected = _shape(arrays[tensor.like].shape)
            raise ArgumentError(f"`{array.name}` is {_shape(array.shape)}; expected the shape of `{tensor.like}`, {expected}")
    for tensor in program.tensors:
        if tensor.role == "output" and tensor.like and not tensor.broadcasts:
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


def _sizes(given: Iterable[Pair], longest: Lengths) -> dict[str, int]:
    """The sizes of a call with these arrays, in whichever order they come."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}  # the array that states a size
    captured = [pair for pair in given if pair[0].broadcasts]
    for array, position, axis in _axes(pair for pair in given if not pair[0].broadcasts):
        _state(array, position, axis, sizes, origin)
        if array.shape[position] != (wanted := evaluate(axis.size, sizes)):
            raise ArgumentError(_wrong_size(array, position, axis, wanted, origin))
        if axis.name:
            sizes[axis.name] = wanted
    limited = _limits(sizes, longest)
    at_least = {length: limit for length, limit in limited.items() if length not in sizes}
    for array, position, axis in _axes(captured):
        if axis.is_free and axis.name not in at_least and array.shape[position] != 1:
            _state(array, position, axis, sizes, origin)
    for array, position, axis in _axes(captured):
        size = array.shape[position]
        if size == 1 and axis.is_free:
            sizes.setdefault(axis.name, 1)
        elif axis.name in at_least:
            if size < at_least[axis.name]:
                raise ArgumentError(_too_short(array, position, axis, at_least[axis.name], longest))
        elif size != (wanted := evaluate(axis.size, sizes)):
            raise ArgumentError(_wrong_size(array, position, axis, wanted, origin))
        elif axis.name:
            sizes[axis.name] = wanted
    return sizes | limited


def _axes(given: Iterable[Pair]) -> Iterator[tuple[ArrayView, int, Axis]]:
    """Each axis of tensors, with the array and the number of its dimension."""
    return ((array, position, axis) for tensor, array in given for position, axis in enumerate(tensor.axes))


def _state(array: ArrayView, position: int, axis: Axis, sizes: dict[str, int], origin: dict[str, str]) -> None:
    """Adds the size that an array states along a dimension, if it is the first. Raises ArgumentError for one that cannot be."""
    size = array.shape[position]
    if isinstance(axis.size, OneMore):
        if not size:
            raise ArgumentError(f"`{array.name}` is [0]; expected at least one number: where sequences begin and the last ends")
        name, size = axis.size.size, size - 1
    elif axis.is_free:
        name = axis.name
    else:
        return
    if name not in sizes:
        if size > MAX_LENGTH:
            raise ArgumentError(f"`{array.name}` has {size} elements in dimension {position}; at most {MAX_LENGTH}")
        sizes[name], origin[name] = size, array.name


def _limits(sizes: Sizes, longest: Lengths) -> dict[str, int]:
    """The lengths that no sequence of a call exceeds, where the call states them, by the names of their dimensions. `sizes` are
    those of the arrays of rows and keys."""
    for stated in LONGEST:
        if stated in longest and longest[stated] < 0:
            raise ArgumentError(f"`{stated}` is {longest[stated]}; expected the length of the longest sequence, or more")
    return limits(sizes, {stated: min(int(longest[stated]), MAX_LENGTH) for stated in LONGEST if stated in longest})


def limits(sizes: Sizes, longest: Sizes) -> dict[str, int]:
    """The least of what a call states in `longest` and of what its arrays have room for, by the names of lengths: a formula
    (`attngen.plan.formulas`) for every set of sizes."""
    found: dict[str, int] = {}
    for length, stated in zip(("q_len", "kv_len"), LONGEST, strict=True):
        if stated in longest:
            found[length] = smaller(longest[stated], sizes[length]) if length in sizes else longest[stated]
    if "max_pages" in sizes and "kv_len" in found:  # new rows of a cache have no such limit
        found["kv_len"] = smaller(found["kv_len"], sizes["max_pages"] * sizes["page_size"])
    return found


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
    return f"{_has(array, position)}, expected {axis.name or 'size'} = {wanted}{source}"


def _too_short(array: ArrayView, position: int, axis: Axis, wanted: int, longest: Lengths) -> str:
    """Of a captured tensor that lacks elements of the longest sequence that a call may have."""
    stated = f"max_{axis.name}"
    room = f"for which `page_table` has room; pass {stated}=... if no sequence is that long"
    return f"{_has(array, position)}, expected at least {axis.name} = {wanted}, " + (
        f"as `{stated}` says" if longest[stated] == wanted else room
    )


def _has(array: ArrayView, position: int) -> str:
    return f"`{array.name}` is {_shape(array.shape)}: dimension {position} is {array.shape[position]}"


def _shape(shape: tuple[object, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
