"""Calls under autograd and torch.func: gradients of every layout, kept graphs, hooks, parameters made of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo import compiled_autograd  # noqa: E402

import attngen  # noqa: E402
from attngen.torch import Attention, attention  # noqa: E402
from tests.torch.specs import CASES  # noqa: E402
from tests.torch.tensors import BACKEND  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
FP32 = {"atol": 2e-6, "rtol": 2e-5}
Attend = Callable[..., Any]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
    return attention(q, k, v, is_causal=True, mode="naive", **more)


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, is_causal=True)


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, length, 8, generator=made).requires_grad_() for length in (5, 6, 6)]


def test_gradients_of_the_output_have_any_layout(qkv: list[torch.Tensor]) -> None:
    whole = torch.randn(2, 2, 10, 16, generator=torch.Generator().manual_seed(1))
    layouts = {
        "of sum()": torch.ones(()).expand(2, 2, 5, 8),
        "the same for all heads": whole[:, :1, :5, :8].expand(2, 2, 5, 8),
        "the same in all columns": whole[:, :, :5, :1].expand(2, 2, 5, 8),
        "heads inside": whole[:, :, :5, :8].transpose(1, 2).contiguous().transpose(1, 2),
        "columns outside": whole[:, :, :8, :5].transpose(2, 3),
        "every other column and row": whole[:, :, ::2, ::2],
        "not aligned": whole[:, :, :5, 1:9],
    }
    for name, dout in layouts.items():
        found, expected = (torch.autograd.grad(f(*qkv), qkv, dout) for f in (ours, theirs))
        torch.testing.assert_close(found, expected, **FP32, msg=lambda m, n=name: f"{n}: {m}")
    for dlse in (torch.ones(()).expand(2, 2, 5), whole[:, :, ::2, 0], whole[:, :, :5, 0].transpose(0, 1)):
        found, expected = (
            torch.autograd.grad(attention(*qkv, is_causal=True, mode=mode, return_lse=True)[1], qkv[:2], dlse)
            for mode in ("naive", "math")
        )
        torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Error detected")
def test_kept_graphs_hooks_and_anomalies(qkv: list[torch.Tensor]) -> None:
    output = ours(*qkv)
    first = torch.autograd.grad(output.sin().sum(), qkv, retain_graph=True)
    again = torch.autograd.grad(output.sin().sum(), qkv)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), qkv)

    def hooked(attend: Attend) -> tuple[torch.Tensor, ...]:
        q = qkv[0] * 1
        q.register_hook(lambda gradient: 2 * gradient)
        output = attend(q, *qkv[1:])
        output.register_hook(lambda gradient: 3 * gradient)
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(output.sum(), qkv)
        return found

    torch.testing.assert_close(hooked(ours), hooked(theirs), atol=2e-5, rtol=2e-5)
    with torch.autograd.detect_anomaly():
        torch.autograd.grad(ours(*qkv).sum(), qkv)
        with pytest.raises(RuntimeError, match="'_AttentionBackward' returned nan"):
            ours(qkv[0] * float("nan"), *qkv[1:]).sum().backward()
    changed = qkv[0] * 1
    output = ours(changed, *qkv[1:])
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("device", ["emulated", "emulated:fast"])  # through torch's operator, and as an array of any library
def test_what_a_kernel_overwrites_is_noticed_by_a_backward(qkv: list[torch.Tensor], device: str) -> None:
    """`out`, `lse` and caches are written in place: what has saved one must not compute gradients from other numbers."""
    q, k, v = (t.detach() for t in qkv)
    kernel = attngen.compile(attngen.define(dtype="fp32", head_dim=8, lse=True), kernel="naive", device=device)
    out, lse = torch.ones_like(q), torch.ones(2, 2, 5)
    caches = torch.ones(2, 2, 2, 9, 8).unbind()
    layer = Attention(mask="causal", mode="naive")
    for written, write in (
        ((out, lse), lambda: kernel(q, k, v, out=out, lse=lse)),
        (caches, lambda: layer.decode(q[:, :, :1], *caches, k[:, :, :1], v[:, :, :1], cache_seqlens=3)),
    ):
        weights = [torch.ones_like(t, requires_grad=True) for t in written]
        losses = [(weight * t).sum() for weight, t in zip(weights, written, strict=True)]
        write()
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    with torch.inference_mode():
        kernel(q, k, v, out=torch.empty_like(q))  # an inference tensor has no version


def test_a_buffer_may_become_a_parameter(qkv: list[torch.Tensor]) -> None:
    table = torch.tensor([0.5, 0.25])
    layer = Attention(mask="causal", score=lambda s, b, h, q, k: s + table[h] * (k - q), mode="naive")
    layer(*qkv).sum().backward()
    assert [name for name, _ in layer.named_buffers()] == ["table"]
    layer.table = torch.nn.Parameter(layer.table.clone())
    layer(*qkv).sin().sum().backward()
    assert [name for name, _ in layer.named_parameters()] == ["table"]
    assert layer.table.grad.abs().min() > 0
    other = torch.func.grad(lambda t: torch.func.functional_call(layer, {"table": t}, tuple(qkv)).sin().sum())(table)
    assert torch.equal(other, layer.table.grad)


def test_vmap_over_captured_tensors_alone(qkv: list[torch.Tensor]) -> None:
    """Compiled too, where torch.compile traces the transform."""
    layer = Attention(mask="causal", score="alibi(slopes)", inputs={"slopes": ("fp32", ("heads",))}, mode="naive")
    q, k, v = (t.detach() for t in qkv)
    many = torch.randn(3, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    each = torch.stack([layer(q, k, v, slopes=slopes) for slopes in many])
    (expected,) = torch.autograd.grad(each.sin().sum(), many)

    def batched(many: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.vmap(lambda slopes: layer(q, k, v, slopes=slopes))(many)
        return result

    torch._dynamo.reset()
    for call in (batched, torch.compile(batched, fullgraph=True, backend=BACKEND)):
        output = call(many)
        assert torch.equal(output, each)
        assert torch.equal(torch.autograd.grad(output.sin().sum(), many)[0], expected)


def test_a_backward_after_its_transform(qkv: list[torch.Tensor]) -> None:
    """torch.func.vjp returns a function that is called when the transform has ended."""
    tensors = [t.detach() for t in qkv]
    dout = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    of_ours, of_theirs = (torch.func.vjp(f, *tensors)[1] for f in (ours, theirs))
    torch.testing.assert_close(of_ours(dout), of_theirs(dout), **FP32)
    found = torch.vmap(of_ours)(torch.stack([dout, -dout]))
    torch.testing.assert_close([t[1] for t in found], list(of_theirs(-dout)), **FP32)


def test_backwards_of_many_gradients_of_the_output(qkv: list[torch.Tensor]) -> None:
    """By torch.autograd's own vmap, which is another than torch.vmap."""
    many = torch.randn(3, 2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    found, expected = (torch.autograd.grad(f(*qkv), qkv, many, is_grads_batched=True) for f in (ours, theirs))
    torch.testing.assert_close(found, expected, **FP32)
    by_lse, expected_by_lse = (
        torch.autograd.grad(
            attention(*qkv, is_causal=True, mode=mode, return_lse=True)[1], qkv[:2], many[..., 0], is_grads_batched=True
        )
        for mode in ("naive", "math")
    )
    torch.testing.assert_close(by_lse, expected_by_lse, **FP32)

    def jacobian(attend: Attend, of: int) -> torch.Tensor:
        given = lambda t: [t if at == of else one.detach() for at, one in enumerate(qkv)]  # noqa: E731
        found: torch.Tensor = torch.autograd.functional.jacobian(lambda t: attend(*given(t))[0, 0, :2], qkv[of], vectorize=True)
        return found

    for of in range(3):
        torch.testing.assert_close(jacobian(ours, of), jacobian(theirs, of), **FP32)


def test_vmap_of_a_dimension_that_is_innermost_in_memory(qkv: list[torch.Tensor]) -> None:
    """Kernels that copy whole rows read it too: folded into batch, and sample after sample."""
    q, k, v = (t.detach() for t in qkv)
    many = torch.stack([v, 2 * v, -v], dim=-1)
    found = torch.vmap(lambda v: attention(q, k, v, is_causal=True), in_dims=-1)(many)
    torch.testing.assert_close(found, torch.vmap(lambda v: theirs(q, k, v), in_dims=-1)(many), **FP32)
    case = CASES["head"]
    q, k, v, slopes = (t.detach() for t in case.tensors(torch.float32).values())
    pairs = (torch.stack([v, 2 * v], dim=-1), torch.stack([slopes, -slopes], dim=-1))

    def gradients(mode: str) -> tuple[torch.Tensor, ...]:
        loss = lambda v, slopes: Attention(case.spec(), mode=mode)(q, k, v, slopes=slopes).sin().sum()  # noqa: E731
        result: tuple[torch.Tensor, ...] = torch.vmap(torch.func.grad(loss, (0, 1)), in_dims=-1)(*pairs)
        return result

    torch.testing.assert_close(gradients("auto"), gradients("math"), **FP32)


def test_compiled_autograd(qkv: list[torch.Tensor]) -> None:
    """The backward of an eager forward, traced when it runs."""
    expected = torch.autograd.grad(theirs(*qkv).sin().sum(), qkv)
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend=BACKEND, fullgraph=True)):
        ours(*qkv).sin().sum().backward()
    torch.testing.assert_close(tuple(t.grad for t in qkv), expected, **FP32)
