"""The problems of random cases: the arrays of a call in its storage, and the sequences of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attngen.reference.problems import Sample
from attngen.reference.stored import stored, unpacked
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import round_to_storage
from tests.random_draws import Array, Case
from tests.random_lengths import Call


def of_lengths(spec: AttentionSpec, problem: Sample, rows: int, keys: int) -> Sample:
    """The same with the first rows and keys alone, in captured tensors too."""
    parts = {"q_len": slice(rows), "kv_len": slice(keys)}
    inputs = dict(problem.inputs)
    for declared in spec.inputs:
        inputs[declared.name] = inputs[declared.name][tuple(parts.get(str(dim), slice(None)) for dim in declared.dims)]
    return Sample(problem.q[:, :, :rows], problem.k[:, :, :keys], problem.v[:, :, :keys], inputs)


def arrays_of(one: Case, call: Call, spec: AttentionSpec, problem: Sample, seed: int) -> dict[str, Any]:
    """The arrays of a call by the names of its arguments, in the storage of `spec`. What captured tensors have beyond the end
    of a sequence is NaN."""
    problem = replace(problem, inputs=_ending(spec, call, problem.inputs))
    arrays = stored(spec, problem, call.rows, call.keys, call.page_size, one.rows_apart, seed)
    captures_keys = any("kv_len" in declared.dims for declared in spec.inputs)  # an element for each key, not for all that fit
    if spec.kernel.is_counted and (captures_keys or seed % 2):
        arrays["max_kv_len"] = call.shape.kv_len
    if one.rows_apart:  # heads and rows in the other order in memory
        names = ("q",) if spec.kernel.is_paged else ("q", "k", "v")
        axes = dict.fromkeys(names, (0, 1) if spec.kernel.is_packed else (1, 2))
        for name, (first, second) in axes.items():
            arrays[name] = np.ascontiguousarray(arrays[name].swapaxes(first, second)).swapaxes(first, second)
    return arrays


def _ending(spec: AttentionSpec, call: Call, inputs: dict[str, Array]) -> dict[str, Array]:
    """Captured tensors of floats, with NaN for rows and keys that a sequence, or every sequence, lacks."""
    ended = dict(inputs)
    ends = {"q_len": call.rows, "kv_len": call.keys}
    for declared in spec.inputs:
        axes = [axis for axis, dim in enumerate(declared.dims) if dim in ends]
        if declared.dtype.kind != "float" or not axes:
            continue
        array = ended[declared.name].copy()
        nan = round_to_storage(np.float32(np.nan), declared.dtype)
        for axis in axes:
            lengths = ends[str(declared.dims[axis])]
            if "batch" not in declared.dims:
                np.moveaxis(array, axis, 0)[max(lengths) :] = nan
                continue
            by_batch = np.moveaxis(array, (declared.dims.index("batch"), axis), (0, 1))
            for b, length in enumerate(lengths):
                by_batch[b, length:] = nan
        ended[declared.name] = array
    return ended


def of_sequences(
    spec: AttentionSpec, call: Call, output: Array, lse: Array | None
) -> tuple[list[Array], Sequence[Array | None]]:
    """O [1, heads, rows, size] and lse [1, heads, rows] of each sequence."""
    if not spec.kernel.is_packed:
        batches = range(len(call.rows))
        return [output[b : b + 1] for b in batches], [None if lse is None else lse[b : b + 1] for b in batches]
    outputs = [one.swapaxes(0, 1)[None] for one in unpacked(output, call.rows, 0)]
    return outputs, [None] * len(outputs) if lse is None else [one[None] for one in unpacked(lse, call.rows, 1)]
