"""attngen as torch's implementation of flash attention: what torch's operators get and give, on the emulated device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from attngen import ArgumentError  # noqa: E402
from attngen.torch import activated, flash_attn_func, registry  # noqa: E402
from attngen.torch.replacement import flash_operator  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.skipif(not registry.EXISTS, reason="this torch has no registry of flash attention")
ROOT = Path(__file__).parents[2]
ATEN = torch.ops.aten
FP32 = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule that compiles quickest."""
    text = registry.flash_text
    monkeypatch.setattr(registry, "flash_text", lambda _, *described: text("naive", *described))


def by_definition(q, k, v, causal: bool, scale: float | None = None):
    """(O, lse) of [batch, heads, length, size] in fp64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2]).logical_not()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_torchs_list_and_the_implementation_before() -> None:
    attention = torch.nn.attention
    assert "attngen" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    with activated():
        assert attention.current_flash_attention_impl() == "attngen"
        with activated(emulated=True):
            assert attention.current_flash_attention_impl() == "attngen emulated"
        assert attention.current_flash_attention_impl() == "attngen"
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    with pytest.raises(NotImplementedError):
        flash_operator(*[randn(1, 2, 4, 8)] * 3)  # torch has none for the CPU


@pytest.mark.usefixtures("naive")
def test_operators_have_torchs_shapes_strides_and_meaning() -> None:
    q, k = randn(2, 5, 4, 16, dtype=torch.float32).transpose(1, 2), randn(2, 2, 9, 16, dtype=torch.float32)
    expected, expected_lse = by_definition(q, k, k, True, 0.3)
    call = partial(flash_operator, q, k, k, is_causal=True, scale=0.3)
    with activated(emulated=True):
        found = call()
        others = ATEN._flash_attention_forward(
            q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), None, None, 5, 9, 0.0, True, False, scale=0.3
        )
        with pytest.raises(ArgumentError, match="return_debug_mask"):
            call(return_debug_mask=True)
        with pytest.raises(ArgumentError, match="dropout_p"):
            call(dropout_p=1.0)
    meta = flash_operator(*(t.to("meta") for t in (q, k, k)), is_causal=True)
    for one, like in zip(found, meta, strict=True):
        if isinstance(like, torch.Tensor):
            assert (one.shape, one.stride(), one.dtype) == (like.shape, like.stride(), like.dtype)
        else:
            assert one == like
    torch.testing.assert_close(found[0].double(), expected, **FP32)
    torch.testing.assert_close(found[1].double(), expected_lse, **FP32)
    assert torch.equal(others[0].transpose(1, 2), found[0])
    assert torch.equal(others[1], found[1])


@pytest.mark.long
@pytest.mark.usefixtures("naive", "fresh_dynamo")
def test_contiguous_rows_between_two_chunks() -> None:
    """Tensor.contiguous returns them as they are, and kernels copy chunks of 16 bytes."""
    q, base = randn(1, 2, 4, 16, dtype=torch.float32), randn(400, dtype=torch.float32)
    k = base[3 : 3 + 9 * 2 * 16].view(1, 9, 2, 16).transpose(1, 2)
    with activated(emulated=True):
        found = flash_operator(q, k, k)[0]
    torch.testing.assert_close(found.double(), by_definition(q, k, k, False)[0], **FP32)


def test_compiled_graphs_call_it() -> None:
    q, k = randn(2, 5, 4, 16, dtype=torch.float32).transpose(1, 2), randn(2, 2, 9, 16, dtype=torch.float32)
    call = lambda q: flash_operator(q, k, k, 0.0, True, scale=0.3)[0]  # noqa: E731
    with activated(emulated=True):
        assert torch.equal(torch.compile(call, backend=BACKEND, fullgraph=True)(q), call(q))


@pytest.mark.usefixtures("naive")
def test_a_backward_that_computes_its_own_lse_is_refused() -> None:
    """In a ring it would be that of some keys alone."""
    q = randn(1, 2, 4, 8, dtype=torch.float32).requires_grad_()
    with activated(emulated=True):
        output = flash_operator(q, q, q)[0]
        with pytest.raises(ArgumentError, match="computes lse itself"):
            output.sum().backward()


@pytest.mark.long
def test_dropout_drops_the_same_in_the_backward() -> None:
    """With V as the unit matrix O holds the weights that were kept, and dV = O^T dO."""
    q, v = randn(1, 1, 16, 16, dtype=torch.float32), torch.eye(16)[None, None].requires_grad_()
    with activated(emulated=True):
        torch.manual_seed(1)
        output, *_, rng_state, _, _ = flash_operator(q, q, v, 0.5)
        torch.manual_seed(1)
        again = flash_operator(q, q, v, 0.5)[0]
        direction = torch.randn(1, 1, 16, 16)
        (dv,) = torch.autograd.grad(output, v, direction)
    assert (rng_state.dtype, rng_state.shape) == (torch.uint64, (2,))
    assert 0.3 < float((output == 0).float().mean()) < 0.7
    assert torch.equal(output, again)
    torch.testing.assert_close(dv, output.mT @ direction, **FP32)


@pytest.mark.long
def test_torchs_varlen_attn() -> None:
    """Packed sequences with a window, forward and backward, against flash-attention's function of each."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    tensors = [randn(10, 2, 16, dtype=torch.float32).add(i).requires_grad_() for i in range(3)]
    direction = randn(10, 2, 16, dtype=torch.float32)
    with activated(emulated=True):
        found = varlen_attn(*tensors, ends, ends, 7, 7, window_size=(3, 0))
        gradients = torch.autograd.grad(found, tensors, direction)
    parts = [[t[a:b][None] for t in tensors] for a, b in ((0, 3), (3, 10))]
    expected = torch.cat([flash_attn_func(*part, causal=True, window_size=(3, 0), mode="math")[0] for part in parts])
    torch.testing.assert_close(found, expected, **FP32)
    for one, right in zip(gradients, torch.autograd.grad(expected, tensors, direction), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)
