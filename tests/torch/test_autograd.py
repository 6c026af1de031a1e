"""Calls under autograd and torch.func: gradients of every layout, kept graphs, hooks, parameters made of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attngen.torch import Attention, attention  # noqa: E402
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
