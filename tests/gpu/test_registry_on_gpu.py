"""attngen as torch's implementation of flash attention, on a GPU: the flash backend and varlen_attn."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attngen.torch import activated, registry  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not registry.EXISTS, reason="this torch has no registry of flash attention")]
TORCHS = functional.scaled_dot_product_attention


def tensors(*shapes: tuple[int, ...], dtype=torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def results(call, given) -> list[torch.Tensor]:
    output = call(*given)
    direction = torch.randn(output.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, given, direction)]


def check(found, expected, tolerance: float = 0.03) -> None:
    for one, right in zip(found, expected, strict=True):
        assert (one.double() - right.double()).abs().max() <= tolerance * right.double().abs().max()


def flash(q, k, v, **named):
    """torch's own function, by its flash backend."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return TORCHS(q, k, v, **named)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The specs that torch's operators ran."""
    texts: list[str] = []
    runtime = registry.runtime
    monkeypatch.setattr(registry, "runtime", lambda text, device: texts.append(text) or runtime(text, device))
    return texts


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("inside", [False, True])  # whether heads lie inside rows
def test_the_flash_backend(calls: list[str], compiled: bool, causal: bool, inside: bool) -> None:
    torch._dynamo.reset()
    shape = (2, 300, 4, 64) if inside else (2, 4, 300, 64)
    given = tensors(shape, shape, shape)

    def call(q, k, v):
        if inside:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return flash(q, k, v, is_causal=causal)

    expected = results(call, given)
    with activated():
        found = results(torch.compile(call) if compiled else call, given)
    assert len(calls) == 1
    check(found, expected)
    results(call, given)
    assert len(calls) == 1  # torch's own again


def test_grouped_heads(calls: list[str]) -> None:
    given = tensors((2, 8, 300, 128), (2, 2, 300, 128), (2, 2, 300, 128))
    call = lambda *t: flash(*t, is_causal=True, enable_gqa=True)  # noqa: E731
    expected = results(call, given)
    with activated():
        check(results(call, given), expected)
    assert len(calls) == 1


def test_dropout_drops_the_same_in_the_backward(calls: list[str]) -> None:
    """With V as the unit matrix O holds the weights that were kept, and dV = O^T dO."""
    q, k = tensors((1, 2, 64, 64), (1, 2, 64, 64))
    v = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(1, 2, 64, 64).clone().requires_grad_()
    with activated():
        output = flash(q, k, v, dropout_p=0.5)
        direction = torch.randn_like(output)
        (dv,) = torch.autograd.grad(output, v, direction)
        again = flash(q, k, v, dropout_p=0.5)
    assert len(calls) == 2
    assert 0.4 < float((output == 0).float().mean()) < 0.6
    assert not torch.equal(output == 0, again == 0)
    check([dv], [output.double().mT @ direction.double()])


def test_checkpoints_drop_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    given = tensors(*[(1, 2, 128, 64)] * 3)
    call = lambda *t: flash(*t, dropout_p=0.5)  # noqa: E731
    with activated():
        torch.manual_seed(1)
        expected = results(call, given)
        torch.manual_seed(1)
        found = results(lambda *t: checkpoint(call, *t, use_reentrant=False), given)
    check(found, expected, 1e-6)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, 0)])
def test_torchs_varlen_attn(calls: list[str], window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    ends = torch.tensor([0, 100, 100, 356], device="cuda", dtype=torch.int32)
    given = tensors(*[(356, 4, 64)] * 3)
    try:
        call = lambda *t: varlen.varlen_attn(*t, ends, ends, 256, 256, window_size=window)  # noqa: E731
        expected = results(call, given)
    except TypeError:
        pytest.skip("this torch's varlen_attn has no window_size")
    with activated():
        check(results(call, given), expected)
    assert len(calls) == 1


def test_graphs_replay() -> None:
    q, k, v = (t.detach() for t in tensors(*[(1, 4, 256, 64)] * 3))
    with activated():
        expected = [flash(q, k, v), flash(2 * q, k, v)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = flash(q, k, v)
        graph.replay()
        first = output.clone()
        q *= 2
        graph.replay()
    assert torch.equal(first, expected[0])
    assert torch.equal(output, expected[1])
