"""The arrays of a sample as a call in any storage takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from attngen.reference.problems import Array, Sample, Shape
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import nans

Arguments = dict[str, Any]  # arguments of a call by name: arrays and numbers
PAGE_SIZE = 16  # rows, of a spec that does not state it
RUBBISH = -(2**31)  # in entries of a page table that no key needs
GAP = 16  # elements: rows begin at multiples of 16 bytes, of booleans too
WRONG = 5  # rows or keys that a sequence does not have
SPARE_PAGES = 2  # per pool, in no sequence


def stored(
    spec: AttentionSpec,
    problem: Sample,
    rows: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    page_size: int = PAGE_SIZE,
    heads_inside: bool = False,
    seed: int = 0,
) -> Arguments:
    """The arguments of a call by name, in the storage of `spec`: the first `rows` of each batch's queries and the first `keys`
    of its keys, by default all.

    Rows of padded keys and of pages that belong to no sequence are NaN. Pages lie in the pool in any order, and the page table
    has rubbish after the last page of a sequence. The pool is [pages, kv_heads, page_size, size], in memory [pages, page_size,
    kv_heads, size] with `heads_inside`.
    """
    kernel = spec.kernel
    batch, _, q_len, _ = problem.q.shape
    kv_len = problem.k.shape[2]
    rows, keys = rows or [q_len] * batch, keys or [kv_len] * batch
    arrays: Arguments = {**problem.arrays(spec)}
    of_keys: list[str] = [name for name in ("k", "v") if name in arrays]
    if kernel.is_packed:
        arrays |= {"q": packed(problem.q, rows), "cu_seqlens_q": begins_of(rows), "max_q_len": q_len}
    if kernel.is_paged:
        page = kernel.page_size or page_size
        table = _page_table(keys, -(-kv_len // page), page, np.random.default_rng(seed))
        pools = {name: _pool(arrays[name], table, keys, page, heads_inside) for name in of_keys}
        arrays |= {**pools, "page_table": table, "seqused": np.array(keys, np.int32)}
    elif kernel.is_counted:
        padded = {name: _padded(arrays[name], keys) for name in of_keys}
        arrays |= {**padded, "seqused": np.array(keys, np.int32)}
    elif kernel.is_packed:
        arrays |= {name: packed(arrays[name], keys) for name in of_keys}
        arrays |= {"cu_seqlens_k": begins_of(keys), "max_kv_len": kv_len}
    if kernel.is_counted and any("kv_len" in declared.dims for declared in spec.inputs):
        arrays["max_kv_len"] = kv_len  # captured tensors have an element for each key, not for all that pages have room for
    return arrays


def with_wrong_lengths(spec: AttentionSpec, arrays: Arguments) -> Arguments:
    """The arguments of `stored` with numbers of keys below 0, and past the room for them, in the place of 0 and of as many as
    there is room for; and with a first row before the first one and an end after the last one. Kernels take the nearest numbers
    that are possible, so that results are the same."""
    found = dict(arrays)
    if spec.kernel.is_counted:
        room = arrays["page_table"].shape[1] * arrays["k"].shape[2] if spec.kernel.is_paged else arrays["k"].shape[2]
        room, used = min(room, arrays.get("max_kv_len", room)), arrays["seqused"]
        found["seqused"] = np.where(used == 0, -WRONG, np.where(used == room, used + WRONG, used)).astype(used.dtype)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in arrays:
            moved = arrays[name].copy()
            moved[0], moved[-1] = -WRONG, moved[-1] + WRONG
            found[name] = moved
    return found


def apart(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The same arrays by name, each with strides that no other has: between its rows lie gaps of NaN, of more elements for each
    later one. A kernel that takes the strides of one array for those of another reads or writes elsewhere."""
    return {name: _with_gaps(array, GAP * number) for number, (name, array) in enumerate(arrays.items(), 1)}


def _with_gaps(array: Array, gap: int) -> Array:
    if array.ndim == 0:
        return array
    if array.ndim == 1:
        return _with_gaps(array[:, None], 1)[:, 0]
    *outer, size = array.shape
    memory = nans((*outer, size + gap), array.dtype)
    memory[..., :size] = array
    return memory[..., :size]


Layout = Literal["rows", "base", "columns", "heads"]


def with_layout(array: Array, layout: Layout) -> Array:
    """The same array in other memory: rows, heads or the base are aligned to an element alone, or columns lie apart."""
    if layout == "heads":
        return _with_odd_heads(array)
    *outer, size = array.shape
    width = {"rows": size + 1, "base": size + GAP, "columns": 2 * size}[layout]
    begin, step = int(layout == "base"), 1 + (layout == "columns")
    memory = nans((*outer, width), array.dtype)
    view = memory[..., begin : begin + step * size : step]
    view[...] = array
    return view


def _with_odd_heads(array: Array) -> Array:
    """[..., heads, rows, size]: an element lies between two heads."""
    *outer, rows, size = array.shape
    memory = nans((*outer, rows * size + 1), array.dtype)
    inside = memory[..., :-1]
    strides = (*inside.strides[:-1], size * array.itemsize, array.itemsize)
    view = np.lib.stride_tricks.as_strided(inside, array.shape, strides)
    view[...] = array
    return view


def stored_sizes(spec: AttentionSpec, shape: Shape) -> dict[str, int]:
    """The sizes of dimensions that a storage adds, of `stored` arrays of a sample of that shape."""
    kernel, batch = spec.kernel, shape.batch
    page = kernel.page_size or PAGE_SIZE
    pages = -(-shape.kv_len // page)
    paged = {"pages": batch * pages + SPARE_PAGES, "page_size": page, "max_pages": max(pages, 1)} if kernel.is_paged else {}
    return {**paged, **({"total_q": batch * shape.q_len, "total_k": batch * shape.kv_len} if kernel.is_packed else {})}


def dense(spec: AttentionSpec, problem: Sample, output: Array, lse: Array | None) -> tuple[Array, Array | None]:
    """O [batch, heads, q_len, size] and lse [batch, heads, q_len] of a call with all rows of `problem`."""
    if not spec.kernel.is_packed:
        return output, lse
    batch, heads, q_len, _ = problem.q.shape
    output = output.reshape(batch, q_len, heads, spec.head_dim_v).swapaxes(1, 2)
    return output, None if lse is None else lse.reshape(heads, batch, q_len).swapaxes(0, 1)


def of_sequences(
    spec: AttentionSpec, rows: Sequence[int], output: Array, lse: Array | None
) -> list[tuple[Array, Array | None]]:
    """O [1, heads, rows, size] and lse [1, heads, rows] of each sequence, of a call whose sequences have so many `rows`."""
    if not spec.kernel.is_packed:
        return [(output[b : b + 1], None if lse is None else lse[b : b + 1]) for b in range(len(rows))]
    outputs = [one.swapaxes(0, 1)[None] for one in unpacked(output, rows, 0)]
    sums = [None] * len(rows) if lse is None else [one[None] for one in unpacked(lse, rows, 1)]
    return [*zip(outputs, sums, strict=True)]


def of_lengths(spec: AttentionSpec, problem: Sample, rows: int, keys: int) -> Sample:
    """The same with the first rows and keys alone, in captured tensors too."""
    parts = {"q_len": slice(rows), "kv_len": slice(keys)}
    inputs = dict(problem.inputs)
    for declared in spec.inputs:
        inputs[declared.name] = inputs[declared.name][tuple(parts.get(str(dim), slice(None)) for dim in declared.dims)]
    return Sample(problem.q[:, :, :rows], problem.k[:, :, :keys], problem.v[:, :, :keys], inputs)


def unpacked(array: Array, rows: Sequence[int], axis: int) -> list[Array]:
    """The rows of each sequence of a packed O or lse, whose axis `axis` has all of them."""
    return np.split(array, np.cumsum(rows)[:-1], axis)


def packed(array: Array, lengths: Sequence[int]) -> Array:
    """[batch, heads, length, size] -> [total, heads, size]."""
    _, heads, _, size = array.shape
    parts = [one[:, :length].swapaxes(0, 1) for one, length in zip(array, lengths, strict=True)]
    return np.concatenate([np.empty((0, heads, size), array.dtype), *parts])


def _padded(array: Array, lengths: Sequence[int]) -> Array:
    padded = nans(array.shape, array.dtype)
    for b, length in enumerate(lengths):
        padded[b, :, :length] = array[b, :, :length]
    return padded


def begins_of(lengths: Sequence[int]) -> Array:
    """cu_seqlens of sequences of these lengths."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def _page_table(keys: Sequence[int], most: int, page: int, rng: np.random.Generator) -> Array:
    used = [-(-length // page) for length in keys]
    pages = iter(rng.permutation(sum(used) + SPARE_PAGES))
    table = np.full((len(keys), max(most, 1) + GAP), RUBBISH, np.int32)[:, : max(most, 1)]  # rows have a stride of their own
    for b, count in enumerate(used):
        table[b, :count] = [next(pages) for _ in range(count)]
    return table


def _pool(array: Array, table: Array, keys: Sequence[int], page: int, heads_inside: bool) -> Array:
    _, heads, _, size = array.shape
    pages = int(sum(-(-length // page) for length in keys)) + SPARE_PAGES
    pool = nans((pages, page, heads, size), array.dtype)
    if not heads_inside:
        pool = np.ascontiguousarray(pool.swapaxes(1, 2)).swapaxes(1, 2)
    for b, length in enumerate(keys):
        for i in range(length):
            pool[table[b, i // page], i % page] = array[b, :, i]
    return pool.swapaxes(1, 2)
