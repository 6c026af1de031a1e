"""Additive masks and scores of any size on the GPU: its ex2, its products and its wgmma are not the emulated ones."""

from __future__ import annotations

import numpy as np
import pytest

import attngen
from attngen.inspect.gpu_memory import from_gpu, to_gpu
from attngen.reference.compare import Comparison, compare, truth
from attngen.reference.problems import Sample
from attngen.spec.dtypes import from_storage, round_to_storage
from tests.device.test_large_scores import BIASED, FACTORS, LOW, biases, whole_numbers

pytestmark = pytest.mark.gpu
KERNELS = ("naive", "tiled", "fused", "wgmma", "hopper")


def compared(compiled: attngen.CompiledAttention, problem: Sample, **params: float) -> Comparison:
    """How the GPU's result compares with the oracle's."""
    q, k, v = map(to_gpu, (problem.q, problem.k, problem.v))
    result = compiled(q, k, v, **{n: to_gpu(x) for n, x in problem.inputs.items()}, **params)
    output, lse = (from_gpu(x) for x in result) if compiled.spec.lse else (from_gpu(result), None)
    return compare(output, lse, truth(compiled.spec, problem, params))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("lse", [False, True])
def test_additive_masks(kernel: str, dtype: str, lse: bool) -> None:
    spec = attngen.define(dtype=dtype, head_dim=64, scale=1.0, lse=lse, **BIASED)
    compiled, problem = attngen.compile(spec, kernel=kernel, device="cuda"), whole_numbers(spec)
    for low in LOW:
        for bias in biases(low).values():
            problem.inputs["bias"] = bias.astype(np.float32)
            assert compared(compiled, problem).passed


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_and_queries_of_any_size(kernel: str) -> None:
    params = {"factor": ("float", 1.0), "shift": ("float", 0.0)}
    spec = attngen.define(dtype="bf16", head_dim=64, scale=1.0, score="s * factor + shift", params=params)
    compiled, problem = attngen.compile(spec, kernel=kernel, device="cuda"), whole_numbers(spec)
    for factor, shift in FACTORS:
        assert compared(compiled, problem, factor=factor, shift=shift).passed
    for mask in (None, "causal"):
        spec = attngen.define(dtype="bf16", head_dim=64, mask=mask)
        compiled, problem = attngen.compile(spec, kernel=kernel, device="cuda"), whole_numbers(spec)
        for size in (2.0**10, 2.0**20, 2.0**60):
            q, k = (round_to_storage(np.float32(size) * from_storage(x), spec.dtype) for x in (problem.q, problem.k))
            assert compared(compiled, Sample(q, k, problem.v, {})).passed
