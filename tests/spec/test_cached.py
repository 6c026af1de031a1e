"""The spec of a cache: its rows are the last ones of the whole sequence's attention, for random specs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attngen.diagnostics import DiagnosticError
from attngen.reference.numpy_oracle import numpy_attention
from attngen.reference.problems import Array, Sample, Shape, sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.cached import USED, of_cache, of_last_rows
from attngen.spec.check import check
from attngen.spec.dropout import without_dropout
from tests import tiers
from tests.random_draws import case

LENGTH, ROWS, ROOM = 23, 4, 28  # rows of the sequence, of a call, and of the cache


def last_rows(spec: AttentionSpec, whole: Sample) -> Sample:
    """The arrays of a call with the last rows of `whole`; what a cache has after its keys repeats the first ones."""

    def longer(array: Array, axis: int) -> Array:
        return np.concatenate([array, array.take(range(ROOM - LENGTH), axis)], axis)

    inputs = {USED: np.array([LENGTH], np.int32)}
    for declared in spec.inputs:
        array = whole.inputs[declared.name]
        for axis, dim in enumerate(declared.dims):
            array = array.take(range(LENGTH - ROWS, LENGTH), axis) if dim == "q_len" else array
            array = longer(array, axis) if dim == "kv_len" else array
        inputs[declared.name] = array
    return Sample(whole.q[:, :, LENGTH - ROWS :], longer(whole.k, 2), longer(whole.v, 2), inputs)


@pytest.mark.parametrize("seeds", tiers.cases([range(60), range(60, 1000)], quick=[range(60)]), ids=["few", "many"])
def test_rows_of_a_cache_are_the_last_of_the_whole(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        one = case(seed)
        spec = replace(without_dropout(one.spec()), rotary=None)
        params = {} if one.python_mask else one.by_word(one.params)
        in_cache = of_cache(of_last_rows(spec), (USED,))
        whole = sample(spec, Shape(1, one.shape.q_heads, one.shape.kv_heads, LENGTH, LENGTH), seed)
        try:
            check(in_cache)
            found = numpy_attention(in_cache, last_rows(spec, whole), params).output
        except (DiagnosticError, IndexError):  # an index that depends on the length, or tables for other lengths
            continue
        expected = numpy_attention(spec, whole, params).output[:, :, LENGTH - ROWS :]
        assert np.allclose(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True), (seed, one.text)
        compared += 1
    assert compared > 0.6 * len(seeds)
