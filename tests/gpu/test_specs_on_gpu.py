"""Every shipped spec on the GPU: three schedules, every storage type, many shapes, against float64.

The bound is twice the error of torch's own result at the same precision, plus one unit in the last place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import attngen
from attngen.device.cuda.compiler import compile_text
from attngen.keywords import PORTABLE_SCHEDULES, SCHEDULE_NAMES
from attngen.plan import ARCHES
from attngen.reference.compare import lse_bound, unit_in_last_place
from attngen.reference.problems import Shape, sample
from attngen.reference.torch_oracle import to_torch, torch_attention
from attngen.schedules import schedules_for
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES
from attngen.spec.expr import Const, Name
from tests.conftest import ROOT
from tests.device.test_consumers_tiles import CASES
from tests.device.test_key_vectors import DESCRIBED, described
from tests.harness import SPECS
from tests.hopper import HOPPER_SCHEDULES

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

LENGTHS = (1, 7, 128, 1000, 4096)


def torch_math(spec: AttentionSpec, q: Any, k: Any, v: Any, *, inputs: dict[str, Any] | None = None) -> Any:
    """Torch's own result at storage precision: its math backend if that can express the spec, else the same formula in fp32,
    with the output rounded."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if spec.mask is None and isinstance(spec.score, Name) and spec.normalize == "softmax" and spec.sink is None:
        assert isinstance(spec.scale, Const), spec.scale
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=float(spec.scale.value), enable_gqa=q.shape[1] != k.shape[1]
            )
    output, _ = torch_attention(spec, q, k, v, inputs=inputs, compute=torch.float32)
    return output.to(q.dtype)


def spec_with(name: str, dtype: str) -> AttentionSpec:
    (spec,) = (attngen.load(ROOT / "specs" / f"{name}.attn"),)
    return replace(spec, dtype=DTYPES[dtype])


def max_error(found, exact) -> float:
    if exact.numel() == 0:
        return 0.0
    difference = torch.where(found.double() == exact, 0.0, (found.double() - exact).abs())
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def check(spec: AttentionSpec, kernels, shape: Shape, seed: int = 0) -> None:
    problem = sample(spec, shape, seed)
    q, k, v = (to_torch(t, "cuda") for t in (problem.q, problem.k, problem.v))
    inputs = {n: to_torch(t, "cuda") for n, t in problem.inputs.items()}
    exact, exact_lse = torch_attention(spec, q, k, v, inputs=inputs)
    own = max_error(torch_math(spec, q, k, v, inputs=inputs), exact)
    allowed = 2 * own + unit_in_last_place(float(exact.abs().max()), spec.dtype)
    for kernel in kernels:
        out = torch.full_like(exact, float("nan"), dtype=q.dtype)
        result = kernel(q, k, v, out=out, **inputs)
        error = max_error(out, exact)
        assert error <= allowed, (spec.name, spec.dtype, kernel.plan.schedule.name, shape, error, allowed)
        if spec.lse:
            lse = result[1]
            single = torch_attention(spec, q, k, v, inputs=inputs, compute=torch.float32)[1]
            own_lse = max_error(single, exact_lse)
            bound = lse_bound(own_lse, exact_lse.cpu().numpy(), shape.kv_len)
            lse_error = max_error(lse, exact_lse)
            assert lse_error <= bound, (spec.name, spec.dtype, kernel.plan.schedule.name, shape, "lse", lse_error, bound)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", SPECS)
def test_every_schedule_against_float64(name: str, dtype: str) -> None:
    spec = spec_with(name, dtype)
    kernels = [attngen.compile(spec, kernel=schedule, device="cuda") for schedule in schedules_for(spec, ARCHES["sm_90a"])]
    heads = spec.q_heads or 4
    for length in LENGTHS:
        # Short rows come in numbers: the largest of a few errors would be an accident.
        batch = 32 if length < 10 else 1 if length >= 1000 and heads > 8 else 2
        check(spec, kernels, Shape(batch=batch, q_heads=heads, kv_heads=2, q_len=length, kv_len=length), seed=length)


@pytest.mark.parametrize("name", CASES)
def test_consumers_that_pass_over_tiles(name: str) -> None:
    spec, _ = CASES[name]
    kernel = attngen.compile(spec, kernel="hopper", device="cuda")
    for q_len, kv_len in ((300, 1000), (1000, 300), (1000, 1000), (4096, 4096)):
        check(spec, [kernel], Shape(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len), seed=q_len)


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_elements_that_keys_have_for_themselves(name: str, head_dim: int) -> None:
    spec = described(name, head_dim=head_dim)
    kernel = attngen.compile(spec, kernel="hopper", device="cuda")
    for q_len, kv_len in ((300, 1000), (1000, 1000), (4096, 4096)):
        check(spec, [kernel], Shape(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len), seed=q_len)


@pytest.mark.parametrize("name", ["gpt2", "unequal_heads", "cross_attention", "padding", "dense_bias"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 500), (500, 33), (1, 1000)])
def test_queries_and_keys_of_different_number(name: str, q_len: int, kv_len: int) -> None:
    spec = spec_with(name, "bf16")
    kernels = [attngen.compile(spec, kernel=schedule, device="cuda") for schedule in schedules_for(spec, ARCHES["sm_90a"])]
    check(spec, kernels, Shape(batch=16 if q_len == 1 else 2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len))


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        *((r, d) for d in ("fp16", "bf16", "fp32") for r in PORTABLE_SCHEDULES),
        *((r, d) for d in ("fp16", "bf16") for r in HOPPER_SCHEDULES),
    ],
)
def test_strided_and_expanded_tensors_are_read_in_place(schedule: str, dtype: str) -> None:
    spec = spec_with("gpt2", dtype)
    kernel = attngen.compile(spec, kernel=schedule, device="cuda")
    element = getattr(torch, DTYPES[dtype].torch)
    packed = torch.randn(2, 200, 3, 4, 64, device="cuda").to(element)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    k = k[:, :1].expand(2, 4, 200, 64)
    exact, _ = torch_attention(spec, q, k, v)
    own = max_error(torch_math(spec, q, k, v), exact)
    out = torch.empty(2, 200, 4, 64, device="cuda", dtype=element).transpose(1, 2)
    kernel(q, k, v, out=out)
    assert max_error(out, exact) <= 2 * own + unit_in_last_place(float(exact.abs().max()), spec.dtype)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_rows_with_no_key_give_zero_and_minus_infinity(schedule: str) -> None:
    spec = attngen.define(dtype="bf16", head_dim=64, mask="k < q - 40", lse=True)
    q, k, v = torch.randn(3, 1, 2, 100, 64, device="cuda", dtype=torch.bfloat16)
    output, lse = attngen.compile(spec, kernel=schedule, device="cuda")(q, k, v)
    assert torch.equal(output[:, :, :41], torch.zeros_like(output[:, :, :41]))
    assert bool((lse[:, :, :41] == float("-inf")).all())
    assert bool(lse[:, :, 41:].isfinite().all())
    assert bool(output.isfinite().all())


def test_attention_function_agrees_with_torch() -> None:
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.float16)
    bias = torch.randn(1, 4, 1, 300, device="cuda", dtype=torch.float16)
    allowed = torch.rand(2, 1, 300, 300, device="cuda") > 0.3
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": bias}, {"attn_mask": allowed}, {"scale": 0.3}):
        exact = {n: x.double() if x is bias else x for n, x in kwargs.items()}
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **exact)
        for mode in ("auto", "naive", "tiled", "fused", "hopper"):
            assert max_error(attngen.attention(q, k, v, mode=mode, **kwargs), expected) < 4e-3


def test_launches_on_the_current_stream_and_replays_in_a_graph() -> None:
    spec = spec_with("packed_documents", "bf16")
    kernel = attngen.compile(spec, device="cuda")
    q, k, v = torch.randn(3, 2, 4, 256, 128, device="cuda", dtype=torch.bfloat16)
    document = torch.arange(256, device="cuda", dtype=torch.int32).div(50, rounding_mode="floor").expand(2, 256)
    expected = kernel(q, k, v, document=document)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(kernel(q, k, v, document=document), expected)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, k, v, document=document)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_offsets_are_64_bit() -> None:
    """More than 2^31 elements of Q: the last head must be as right as the first, whose Q is another."""
    spec = spec_with("gpt2", "fp16")
    kernel = attngen.compile(spec, device="cuda")
    first, last, k, v = torch.randn(4, 1, 1, 4096, 64, device="cuda", dtype=torch.float16)
    q = torch.empty(1, 8448, 4096, 64, device="cuda", dtype=torch.float16)
    assert q.numel() > 2**31
    q[:] = first
    q[:, -1:] = last
    found = kernel(q, k.expand(1, 8448, 4096, 64), v.expand(1, 8448, 4096, 64))
    for head, its_q in ((found[:, :1], first), (found[:, -2:-1], first), (found[:, -1:], last)):
        exact, _ = torch_attention(spec, its_q, k, v)
        own = max_error(torch_math(spec, its_q, k, v), exact)
        assert max_error(head, exact) <= 2 * own + unit_in_last_place(float(exact.abs().max()), spec.dtype)
    assert torch.equal(found[:, -2:-1], found[:, :1])


def test_registers_are_known_at_every_compilation() -> None:
    """Where there is a driver, NVRTC could answer the second compilation from a cache of its own, without ptxas's report."""
    source = attngen.compile(spec_with("gpt2", "fp16"), device="cuda").source
    first, second = (compile_text(source).resources() for _ in range(2))
    assert first
    assert first == second
