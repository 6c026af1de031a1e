"""Gradients on the GPU: every schedule that has a backward, against float64; the same bits on a busy GPU; a CUDA graph of a
training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import attngen
from attngen.device.params import check_params, declared_params
from attngen.device.select import device_by_name
from attngen.plan import ARCHES
from attngen.reference.problems import Shape, sample
from attngen.schedules import schedules_for
from attngen.spec.gradient import QKV, differentiable
from attngen.spec.obligations import ObligationError, check_obligations
from tests.harness import SMALL_PARAMS, SPECS, small, wrong_gradients

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import Attention, attention  # noqa: E402

SHAPES = (Shape(2, 4, 2, 1, 1), Shape(2, 4, 2, 7, 130), Shape(1, 4, 2, 300, 300), Shape(1, 4, 2, 513, 257))


def schedules(spec: attngen.AttentionSpec) -> tuple[str, ...]:
    """The keywords that have a backward of the spec on this GPU."""
    arch = ARCHES[device_by_name("cuda").arch]
    return schedules_for(spec, arch, QKV)


def shapes(spec: attngen.AttentionSpec, params: dict[str, Any]) -> Iterator[tuple[int, Shape]]:
    """A seed and a shape, without the shapes of which an index of the spec would be out of range."""
    for seed, shape in enumerate(SHAPES):
        try:
            check_obligations(spec, shape.sizes(spec), check_params(declared_params(spec), params))
        except ObligationError:
            continue
        yield seed, shape


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", SPECS)
def test_every_spec(name: str, dtype: str) -> None:
    spec, params = small(name, dtype), SMALL_PARAMS.get(name, {})
    for schedule in schedules(spec):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for seed, shape in shapes(spec, params):
            assert not wrong_gradients(kernel, shape, QKV, seed=seed, deterministic=True, **params), (schedule, shape)


@pytest.mark.parametrize("name", [n for n in SPECS if differentiable(small(n))])
def test_captured_tensors(name: str) -> None:
    spec, params = small(name), SMALL_PARAMS.get(name, {})
    kernel = attngen.compile(spec, device="cuda")
    for seed, shape in shapes(spec, params):
        assert not wrong_gradients(kernel, shape, (*QKV, *differentiable(spec)), seed=seed, **params), shape


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", [None, "causal", "causal and window(100)"])
def test_head_sizes(head_dim: int, mask: str | None) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask)
    for schedule in schedules(spec):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for deterministic in (True, False):
            wrong = wrong_gradients(kernel, Shape(1, 4, 2, 400, 460), QKV, deterministic=deterministic)
            assert not wrong, (schedule, deterministic)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_in_any_order(name: str, dtype: str) -> None:
    spec, params = small(name, dtype), SMALL_PARAMS.get(name, {})
    kernel = attngen.compile(spec, device="cuda")
    for seed, shape in shapes(spec, params):
        assert not wrong_gradients(kernel, shape, QKV, seed=seed, deterministic=False, **params), shape


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mode", ["fused", "hopper"])
def test_the_same_bits_on_a_busy_gpu(mode: str, head_dim: int) -> None:
    if mode not in schedules(attngen.define(dtype="bf16", head_dim=head_dim, mask="causal")):
        pytest.skip(f"no backward of {mode} here")
    q, k, v = (torch.randn(2, 8, 1000, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = attention(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True, mode=mode, deterministic=True)
    gradient, busy, other = torch.randn_like(out), torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first = torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
    for _ in range(100):
        with torch.cuda.stream(other):
            busy = (busy @ busy).clamp(-1, 1)
        again = torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_training_step_as_a_cuda_graph() -> None:
    layer = Attention(mask="causal", score="alibi(slopes)", inputs={"slopes": ("fp32", ("heads",))})
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    slopes = torch.rand(4, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(q, k, v, slopes=slopes).float().square().sum(), (q, k, v, slopes))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_errors_beside_cudnn(head_dim: int, dtype: torch.dtype) -> None:
    """At most 1.25 times cuDNN's largest error, plus one unit in the last place of the gradient."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 4, 1024, head_dim, device="cuda").to(dtype).requires_grad_() for _ in range(3))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    gradient = torch.randn_like(q)
    scores = (exact[0] @ exact[1].mT * head_dim**-0.5).masked_fill(
        torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu(1), -torch.inf
    )
    truth = torch.autograd.grad(scores.softmax(-1) @ exact[2], exact, gradient.double())
    ours = torch.autograd.grad(attention(q, k, v, is_causal=True), (q, k, v), gradient)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = torch.autograd.grad(out, (q, k, v), gradient)
    for mine, other, t in zip(ours, theirs, truth, strict=True):
        unit = torch.finfo(dtype).eps * float(t.abs().max())
        assert float((mine.double() - t).abs().max()) <= 1.25 * float((other.double() - t).abs().max()) + unit


def test_lengths_that_no_tile_divides_leave_no_trace_of_padding() -> None:
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal_bottom_right")
    for schedule in schedules(spec):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for q_len, kv_len in ((1, 1), (63, 65), (129, 127), (200, 1)):
            assert not wrong_gradients(kernel, sample(spec, Shape(1, 2, 1, q_len, kv_len)), QKV), (schedule, q_len, kv_len)
