"""Running a spec on the emulated device and comparing it with the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attngen.api import CompiledAttention, compile
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.emit.kernel_source import KernelSource
from attngen.language import load_file
from attngen.plan import ARCHES, choose
from attngen.reference.compare import Comparison, Truth, compare
from attngen.reference.problems import Sample
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES
from tests.conftest import ROOT

SPECS = sorted(p.stem for p in (ROOT / "specs").glob("*.attn"))


def shipped(name: str, dtype: str | None = None) -> AttentionSpec:
    """A shipped spec, with another storage type if asked."""
    (spec,) = load_file(ROOT / "specs" / f"{name}.attn")
    return spec if dtype is None else replace(spec, dtype=DTYPES[dtype])


def call(compiled: CompiledAttention, problem: Sample, **params: Any) -> tuple[Any, Any]:
    """(O, lse or None); O starts as NaN, so an element that is not written fails every comparison."""
    out = np.empty((*problem.q.shape[:3], compiled.spec.head_dim_v), compiled.spec.dtype.numpy)
    out.view(np.uint8)[...] = 0xFF
    result = compiled(problem.q, problem.k, problem.v, out=out, **problem.inputs, **params)
    return result if compiled.spec.lse else (result, None)


def run(spec: AttentionSpec, rung: str, problem: Sample, expected: Truth, seed: int = 0, **params: Any) -> Comparison:
    """One rung on the emulated device in checked mode, its threads in the order of `seed`."""
    compiled = compile(spec, kernel=rung, device=EmulatedDevice(checked=True, seed=seed))
    return compare(*call(compiled, problem, **params), expected)


def compile_text(spec: AttentionSpec, rung: str, source: KernelSource, seed: int = 0) -> CompiledAttention:
    """A callable of `spec` whose CUDA text is `source`, which may have been tampered with."""
    device = EmulatedDevice(checked=True, seed=seed)
    return CompiledAttention(spec, choose(spec, ARCHES["sm_80"], rung), device.compile(source), device)


def emitted(spec: AttentionSpec, rung: str, arch: str = "sm_80") -> KernelSource:
    return emit(spec, choose(spec, ARCHES[arch], rung))
