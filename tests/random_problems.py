"""The problems of random cases: the arrays of a call in its storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attngen.reference.problems import Sample
from attngen.reference.stored import stored
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import round_to_storage
from tests.random_draws import Array, Case
from tests.random_lengths import Call


def arrays_of(one: Case, call: Call, spec: AttentionSpec, problem: Sample, seed: int) -> dict[str, Any]:
    """The arrays of a call by the names of its arguments, in the storage of `spec`. What captured tensors have beyond the end
    of a sequence is NaN."""
    problem = replace(problem, inputs=_ending(spec, call, problem.inputs))
    arrays = stored(spec, problem, call.rows, call.keys, call.page_size, one.rows_apart, seed)
    if spec.kernel.is_counted and seed % 2:
        arrays["max_kv_len"] = call.shape.kv_len
    if one.rows_apart:  # heads and rows in the other order in memory
        names = [name for name in ("q", "k", "v") if name in arrays and (name == "q" or not spec.kernel.is_paged)]
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
