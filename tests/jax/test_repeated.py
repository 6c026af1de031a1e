"""Custom calls that are repeated, as on a GPU, on an emulated device that repeats launches too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import attngen
from attngen import ArgumentError
from attngen.device.arrays import CPU, ArrayView, contiguous_strides
from attngen.device.lazy_kernel import DeferredKernel
from attngen.jax import call as calls
from attngen.jax.call import Call, run
from attngen.jax.repeated import ALIGNMENT, RepeatedCalls
from attngen.language import load_text
from attngen.spec.dtypes import DTYPES, DType
from attngen.spec.print_attn import to_text
from tests.device.repeating import STREAM, RepeatingDevice


@dataclass
class HostScratch:
    """Memory of a call whose bytes nobody wrote."""

    taken: list[np.ndarray] = field(default_factory=list)

    def scratch(self, size: int) -> int:
        self.taken.append(np.full(size + ALIGNMENT, 0xFF, np.uint8))
        return -(-self.taken[-1].ctypes.data // ALIGNMENT) * ALIGNMENT

    def empty_view(self, shape: tuple[int, ...], dtype: DType, name: str) -> ArrayView:
        pointer = self.scratch(int(np.prod(shape)) * dtype.bytes)
        return ArrayView(name, pointer, shape, contiguous_strides(shape), dtype, CPU, self)


def views(arrays: list[np.ndarray], memory: HostScratch) -> list[ArrayView]:
    return [ArrayView("", a.ctypes.data, a.shape, contiguous_strides(a.shape), DTYPES["fp32"], CPU, memory) for a in arrays]


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was bound, with all checks. Calls of the CPU are computed by a device that repeats launches."""
    device, seen, bind = RepeatingDevice(checked=False, arch="sm_90a"), [], calls._bound

    def compiled_of(text: str, _: str, kernel: str | None = None, arch: str | None = None) -> Any:
        if text not in known:  # deferred, as the kernels of custom calls are
            compiled = attngen.compile(load_text(text)[0], device=device, kernel=kernel)
            known[text] = replace(compiled, kernel=DeferredKernel(device, compiled.kernel.source))
        return known[text]

    known: dict[str, Any] = {}
    counter = np.zeros(1, np.int32)
    monkeypatch.setattr(calls, "_prepared", RepeatedCalls())
    monkeypatch.setattr(calls, "compiled_of", compiled_of)
    monkeypatch.setattr(calls, "_counter_of", lambda location, stream: counter.ctypes.data)
    monkeypatch.setattr(calls, "_bound", lambda *given: seen.append(given) or bind(*given))
    return seen


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal, of [batch, length, heads, size], in float64."""
    q, k, v = (np.swapaxes(x, 1, 2).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ np.swapaxes(k, 2, 3) / np.sqrt(q.shape[-1])
    p = np.exp(np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf))
    return np.swapaxes(p / p.sum(-1, keepdims=True) @ v, 1, 2)


def of_call(kernel: str | None, does: Any = "forward", **more: Any) -> Call:
    spec = attngen.define(dtype="fp32", head_dim=16, head_dim_v=16, mask="causal")
    return Call(
        spec=to_text(spec), arch="sm_90a", kernel=kernel, deterministic=True, params=(), layout="bshd", inputs=("q", "k", "v"),
        does=does, outputs=("out",), **more,
    )  # fmt: skip


def problem(seed: int, length: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((2, length, heads, 16), np.float32) for heads in (4, 2, 2, 4)]


@pytest.mark.parametrize("kernel", ["hopper", "fused"])
def test_a_repeated_call_computes_other_arrays(kernel: str, bound: list[Any]) -> None:
    """By hopper, with workspaces for terms, of which the second call has others."""
    text = of_call(kernel).text()
    for seed, length in ((0, 70), (1, 70), (2, 33), (3, 70), (4, 33)):
        *given, out = problem(seed, length)
        run(text, CPU, views(given, memory := HostScratch()), views([out], memory), STREAM)
        assert np.abs(out - attention(*given)).max() < 1e-5
        assert bool(memory.taken) == (kernel == "hopper")
    assert len(bound) == 2, "once for each length"


def test_gradients_are_repeated(bound: list[Any]) -> None:
    inputs = ("q", "k", "v", "out", "lse", "lse_rest", "dout")
    saving = replace(of_call("fused", "saving"), outputs=("out", "lse", "lse_rest"))
    backward = replace(of_call("fused", "backward", wanted=("q", "k", "v")), inputs=inputs, outputs=("dq", "dk", "dv"))
    found = []
    for seed in (0, 0, 1, 0):
        *given, out = problem(seed, 70)
        rows = [np.empty((2, 4, 70), np.float32) for _ in range(2)]
        run(saving.text(), CPU, views(given, memory := HostScratch()), views([out, *rows], memory), STREAM)
        gradients = [np.full_like(x, np.nan) for x in given]
        read = [*given, out, *rows, np.ones_like(out)]
        run(backward.text(), CPU, views(read, memory := HostScratch()), views(gradients, memory), STREAM)
        found.append(gradients)
    assert len(bound) == 2, "the forward and the backward"
    for first, again, other, last in zip(*found, strict=True):
        assert np.array_equal(first, again)
        assert np.array_equal(first, last)
        assert not np.array_equal(first, other)
    step, (q, k, v, _) = 1e-4, problem(0, 70)
    direction = np.random.default_rng(9).standard_normal(q.shape)
    difference = attention(q + step * direction, k, v).sum() - attention(q - step * direction, k, v).sum()
    assert abs((found[0][0] * direction).sum() - difference / (2 * step)) < 1e-3


def test_an_address_that_is_not_aligned_is_refused_as_at_first(bound: list[Any]) -> None:
    text = of_call("fused").text()
    for off in (0, 0, 4):
        *given, out = problem(0, 70)
        arrays = views(given, memory := HostScratch())
        arrays[1] = replace(arrays[1], pointer=arrays[1].pointer + off)
        if off:
            with pytest.raises(ArgumentError, match="`k`"):
                run(text, CPU, arrays, views([out], memory), STREAM)
        else:
            run(text, CPU, arrays, views([out], memory), STREAM)
    assert len(bound) == 2


def test_a_result_that_shares_memory_is_refused_again() -> None:
    text = of_call("fused").text()
    *given, out = problem(0, 70)
    run(text, CPU, views(given, memory := HostScratch()), views([out], memory), STREAM)
    with pytest.raises(ArgumentError, match="share memory"):
        run(text, CPU, views(given, memory), views([given[0]], memory), STREAM)
