"""Helpers that compile specs for the emulated device, run them, and compare with the float64 oracle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from attngen.api import CompiledAttention, compile
from attngen.cli import main
from attngen.device.cuda.compiler import Resources, nvrtc_version
from attngen.device.emulated import EmulatedDevice
from attngen.emit.emitter import emit
from attngen.emit.program import Program
from attngen.inspect.gpu_memory import from_gpu, to_gpu
from attngen.language import load_file
from attngen.plan import ARCHES
from attngen.plan.facts import DETERMINISTIC
from attngen.plan.plan import Direction
from attngen.plan.register_table import compilers
from attngen.reference.compare import Comparison, Truth, compare, truth
from attngen.reference.compare_gradients import GradientTruth, compare_gradients, gradient_truth
from attngen.reference.gradients import Loss, sample_loss
from attngen.reference.problems import Sample, Shape, sample
from attngen.reference.stored import packed, stored
from attngen.schedules import choose, default_arch
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import QKV
from tests.conftest import ROOT
from tests.left_out import first_finding, removable, unnoticed

FEW_HEADS = {"llama_gqa": (4, 1), "mistral_window": (4, 2), "gemma_softcap": (2, 1), "gpt_oss_sinks": (4, 2)}
SMALL_PARAMS = {"mistral_window": {"size": 50}}  # a window shorter than the problems of tests
SPILLED_BY_OTHERS = 20  # bytes of a thread at most, by a compiler that has made no table of registers (docs/kernels.md)


def spills(kernel: Resources, most: int = 0) -> bool:
    """Whether a thread spills more than `most` bytes, or what other compilers than those of the table may spill."""
    allowed = most if f"NVRTC-{nvrtc_version()}" in compilers() else SPILLED_BY_OTHERS
    return max(kernel.stack_bytes, kernel.spill_store_bytes) > allowed


@cache
def shipped(name: str, dtype: str | None = None) -> AttentionSpec:
    """A shipped spec, with another storage type if one is given."""
    (spec,) = load_file(ROOT / "specs" / f"{name}.attn")
    return spec if dtype is None else replace(spec, dtype=DTYPES[dtype])


def takes_any_type(spec: AttentionSpec) -> bool:
    """Whether tests may choose the element type and head sizes: Q, K, V and O have one type, and V is no part of K."""
    return len({*spec.dtypes.values()}) == 1 and spec.values is None


SHIPPED = sorted(p.stem for p in (ROOT / "specs").glob("*.attn"))
SPECS = [name for name in SHIPPED if takes_any_type(shipped(name))]
# Each spec in one of the types of 16 bits, which differ in their conversions alone; and in fp32, which has products of its own.
IN_16_BITS = [(name, ("fp16", "bf16")[i % 2]) for i, name in enumerate(sorted(SPECS, key=lambda name: name == "dropout"))]
IN_16_BITS_AND_FP32 = [*IN_16_BITS, *((name, "fp32") for name in SPECS)]


def small(name: str, dtype: str | None = None, narrow: bool = False) -> AttentionSpec:
    """A shipped spec with few heads. `narrow`: heads of 128 or 256 elements become 64, for tests of masks and scores alone."""
    spec = shipped(name, dtype)
    if narrow and spec.head_dim >= 128:
        spec = replace(spec, head_dim=64, head_dim_v=64)
    if name in FEW_HEADS:
        q_heads, kv_heads = FEW_HEADS[name]
        spec = replace(spec, q_heads=q_heads, kv_heads=kv_heads)
    return spec


@lru_cache(maxsize=16)  # a kernel has some megabytes of stacks
def compiled(spec: AttentionSpec, schedule: str, arch: str | None = None, seed: int = 0) -> CompiledAttention:
    """A kernel for the emulated device in checked mode, with threads in the order of `seed`; compiled once for all calls."""
    return compile(spec, kernel=schedule, device=EmulatedDevice(checked=True, seed=seed, arch=arch or default_arch(schedule)))


def call(compiled: CompiledAttention, problem: Sample, **params: Any) -> tuple[Any, Any]:
    """(O, lse or None) of a problem in dense storage."""
    return call_stored(compiled, problem.arrays(compiled.spec), **params)


def call_stored(compiled: CompiledAttention, arrays: Mapping[str, Any], **params: Any) -> tuple[Any, Any]:
    """(O, lse or None) as numpy storage arrays, wherever the kernel runs; `arrays` are in the spec's storage. O starts as NaN,
    so an element that is not written fails every comparison."""
    out = np.empty((*arrays["q"].shape[:-1], compiled.spec.head_dim_v), compiled.spec.dtypes["o"].numpy)
    out.view(np.uint8)[...] = 0xFF
    result = compiled(**_placed(compiled, {**arrays, "out": out}), **params)
    output, lse = result if compiled.spec.lse else (result, None)
    on_gpu = compiled.device.name.startswith("cuda")
    return (from_gpu(output), None if lse is None else from_gpu(lse)) if on_gpu else (output, lse)


def _placed(compiled: CompiledAttention, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays, and numbers as they are, where the kernel runs."""
    if not compiled.device.name.startswith("cuda"):
        return dict(arrays)
    return {name: to_gpu(array) if isinstance(array, np.ndarray) else array for name, array in arrays.items()}


def compared(kernel: CompiledAttention, problem: Sample, expected: Truth | None = None, **params: Any) -> Comparison:
    """The errors of a kernel's result against `expected`, by default the oracle's result."""
    return compare(*call(kernel, problem, **params), expected or truth_for(kernel, problem, **params))


def truth_for(kernel: CompiledAttention, problem: Sample, **params: Any) -> Truth:
    """The oracle's result, and the largest errors allowed to a kernel."""
    return truth(kernel.spec, problem, params, of_bytes=kernel.plan.schedule.multiplies_bytes)


def is_right(kernel: CompiledAttention, problem: Sample, expected: Truth) -> bool:
    return compared(kernel, problem, expected).passed


def gradients(
    kernel: CompiledAttention,
    problem: Sample,
    loss: Loss,
    wanted: tuple[str, ...] | None = None,
    deterministic: bool = DETERMINISTIC,
    **params: Any,
) -> dict[str, Any]:
    """The gradients that a kernel computes of a problem in dense storage, or in packed storage without lse, sequences of one
    length; [batch, heads, length, size] in either."""
    if not kernel.spec.kernel.is_packed:
        given = {"dout": loss.dout, "dlse": loss.dlse, **problem.arrays(kernel.spec)}
        return gradients_stored(kernel, given, wanted, deterministic, **params)
    batch, rows = len(problem.q), problem.q.shape[2]
    given = {**stored(kernel.spec, problem), "dout": packed(loss.dout, [rows] * batch), "dlse": None}
    found = gradients_stored(kernel, given, wanted, deterministic, **params)
    return {name: g.reshape(batch, -1, *g.shape[1:]).swapaxes(1, 2) if name in QKV else g for name, g in found.items()}


def gradients_stored(
    kernel: CompiledAttention,
    arrays: Mapping[str, Any],
    wanted: tuple[str, ...] | None = None,
    deterministic: bool = DETERMINISTIC,
    **params: Any,
) -> dict[str, Any]:
    """The gradients that a kernel computes, as numpy storage arrays, wherever it runs; `arrays` are in the spec's storage, with
    `dout`, and `dlse` or None."""
    found = kernel.backward(wanted=wanted, deterministic=deterministic, **_placed(kernel, arrays), **params)
    on_gpu = kernel.device.name.startswith("cuda")
    return {name: from_gpu(array) for name, array in found.items()} if on_gpu else found


def wrong_gradients(
    kernel: CompiledAttention,
    problem: Sample | Shape,
    wanted: tuple[str, ...] = QKV,
    expected: GradientTruth | None = None,
    seed: int = 0,
    deterministic: bool = DETERMINISTIC,
    **params: Any,
) -> list[Comparison]:
    """The gradients of a kernel whose errors exceed their bounds. A Shape stands for its sample."""
    saved = kernel.gradients(wanted, deterministic).plan.saved
    if isinstance(problem, Shape):
        problem, loss, exact = solved_gradients(kernel.spec, problem, wanted, saved, seed, tuple(params.items()))
    else:
        loss = sample_loss(kernel.spec, problem, seed)
        exact = expected or gradient_truth(kernel.spec, problem, loss, wanted, params, saved)
    found = gradients(kernel, problem, loss, wanted, deterministic, **params)
    return [one for one in compare_gradients(found, expected or exact).values() if not one.passed]


def unnoticed_in_gradients(
    kernel: CompiledAttention,
    statements: re.Pattern[str],
    shape: Shape,
    wanted: tuple[str, ...] = QKV,
    deterministic: bool = DETERMINISTIC,
) -> list[str]:
    """The statements of a kernel's backward that can be left out unnoticed, as its lines."""
    usual = kernel.gradients(wanted, deterministic)
    places = list(statements.finditer(usual.source.text))
    device = EmulatedDevice(checked=True, arch=kernel.plan.arch.name)
    mutant = device.compile(removable(usual.source, places))

    def is_right(seed: int) -> bool:
        backward = replace(usual, kernel=replace(mutant, device=replace(device, seed=seed)), device=device)
        mutated = replace(kernel, _backwards={(wanted, deterministic): backward})
        return not wrong_gradients(mutated, shape, wanted, deterministic=deterministic)

    return unnoticed(usual.source, places, mutant.library, lambda: first_finding(partial(is_right, seed) for seed in (0, 5)))


@lru_cache(maxsize=64)
def solved(spec: AttentionSpec, shape: Shape, seed: int = 0) -> tuple[Sample, Truth]:
    """The sample of a shape and the oracle's result, for tests that need it several times."""
    problem = sample(spec, shape, seed)
    return problem, truth(spec, problem)


@lru_cache(maxsize=64)
def solved_gradients(
    spec: AttentionSpec,
    shape: Shape,
    wanted: tuple[str, ...],
    saved: tuple[str, ...],
    seed: int,
    params: tuple[tuple[str, Any], ...],
) -> tuple[Sample, Loss, GradientTruth]:
    """The same for gradients, with a random loss."""
    problem = sample(spec, shape, seed)
    loss = sample_loss(spec, problem, seed)
    return problem, loss, gradient_truth(spec, problem, loss, wanted, dict(params), saved)


def run(
    spec: AttentionSpec,
    schedule: str,
    problem: Sample | Shape,
    expected: Truth | None = None,
    *,
    arch: str | None = None,
    seed: int = 0,
    **params: Any,
) -> Comparison:
    """The errors of a schedule on the emulated device, compiled once for all calls. A Shape stands for its sample."""
    if isinstance(problem, Shape):
        problem = sample(spec, problem)
    return compared(compiled(spec, schedule, arch, seed), problem, expected, **params)


def compile_text(
    spec: AttentionSpec, schedule: str, source: Program, seed: int = 0, arch: str | None = None
) -> CompiledAttention:
    """A callable of `spec` with the CUDA text of `source`, which may be modified."""
    arch = arch or default_arch(schedule)
    device = EmulatedDevice(checked=True, seed=seed, arch=arch)
    return CompiledAttention(spec, choose(spec, ARCHES[arch], schedule), device.compile(source), device)


def emitted(spec: AttentionSpec, schedule: str, arch: str = "sm_80", direction: Direction = "forward") -> Program:
    """The program of a schedule, planned for an architecture."""
    return emit(spec, choose(spec, ARCHES[arch], schedule, direction=direction))


def cli(*arguments: str) -> Result:
    """The result of a command line."""
    return CliRunner().invoke(main, list(arguments))
