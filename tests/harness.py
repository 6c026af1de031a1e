"""Compile, run and compare: specs of every origin on the emulated device, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from attngen.api import CompiledAttention, compile
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.emit.kernel_source import KernelSource
from attngen.language import load_file
from attngen.plan import ARCHES, choose, default_arch
from attngen.reference.compare import Comparison, Truth, compare, truth
from attngen.reference.problems import Sample, Shape, sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES
from tests.conftest import ROOT

SPECS = sorted(p.stem for p in (ROOT / "specs").glob("*.attn"))
FEW_HEADS = {"llama_gqa": (4, 1), "mistral_window": (4, 2), "gemma_softcap": (2, 1), "gpt_oss_sinks": (4, 2)}
SMALL_PARAMS = {"mistral_window": {"size": 50}}  # a window that is shorter than the small problems of tests


def shipped(name: str, dtype: str | None = None) -> AttentionSpec:
    """A shipped spec, with another storage type if one is given."""
    (spec,) = load_file(ROOT / "specs" / f"{name}.attn")
    return spec if dtype is None else replace(spec, dtype=DTYPES[dtype])


def small(name: str, dtype: str | None = None) -> AttentionSpec:
    """A shipped spec with few heads."""
    spec = shipped(name, dtype)
    if name in FEW_HEADS:
        q_heads, kv_heads = FEW_HEADS[name]
        spec = replace(spec, q_heads=q_heads, kv_heads=kv_heads)
    return spec


@lru_cache(maxsize=16)  # a kernel has some megabytes of stacks
def compiled(spec: AttentionSpec, rung: str, arch: str | None = None, seed: int = 0) -> CompiledAttention:
    """A rung on the emulated device in checked mode, its threads in the order of `seed`: compiled once for all calls."""
    return compile(spec, kernel=rung, device=EmulatedDevice(checked=True, seed=seed, arch=arch or default_arch(rung)))


def call(compiled: CompiledAttention, problem: Sample, **params: Any) -> tuple[Any, Any]:
    """(O, lse or None); O starts as NaN, so an element that is not written fails every comparison."""
    out = np.empty((*problem.q.shape[:3], compiled.spec.head_dim_v), compiled.spec.dtype.numpy)
    out.view(np.uint8)[...] = 0xFF
    result = compiled(problem.q, problem.k, problem.v, out=out, **problem.inputs, **params)
    return result if compiled.spec.lse else (result, None)


def compared(kernel: CompiledAttention, problem: Sample, expected: Truth | None = None, **params: Any) -> Comparison:
    """How a kernel's result compares with `expected`, the oracle's if it is not given."""
    return compare(*call(kernel, problem, **params), expected or truth(kernel.spec, problem, params))


def run(
    spec: AttentionSpec,
    rung: str,
    problem: Sample | Shape,
    expected: Truth | None = None,
    *,
    arch: str | None = None,
    seed: int = 0,
    **params: Any,
) -> Comparison:
    """The same of a rung on the emulated device, compiled once for all calls. A shape stands for its sample."""
    if isinstance(problem, Shape):
        problem = sample(spec, problem)
    return compared(compiled(spec, rung, arch, seed), problem, expected, **params)


def compile_text(
    spec: AttentionSpec, rung: str, source: KernelSource, seed: int = 0, arch: str | None = None
) -> CompiledAttention:
    """A callable of `spec` whose CUDA text is `source`, which may have been tampered with."""
    arch = arch or default_arch(rung)
    device = EmulatedDevice(checked=True, seed=seed, arch=arch)
    return CompiledAttention(spec, choose(spec, ARCHES[arch], rung), device.compile(source), device)


def emitted(spec: AttentionSpec, rung: str, arch: str = "sm_80") -> KernelSource:
    """The kernel of a rung, planned for an architecture."""
    return emit(spec, choose(spec, ARCHES[arch], rung))
