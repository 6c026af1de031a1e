"""flash-attention's functions: their meaning over its own grid of cases, and by the kernels."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attngen import ArgumentError  # noqa: E402
from attngen.torch import attention, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func  # noqa: E402
from attngen.torch.flash_attn import flash_text  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.flash import Case, check, grid, reference, results  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
GQA_WINDOW = Case(causal=True, window_size=(9, 3), softcap=20.0, slopes=2)


def test_the_meaning_of_every_argument() -> None:
    """By torch's operations in float64: exact, so that a pair too many or too few shows, whatever it weighs."""
    for case, (q_len, kv_len), (q_heads, kv_heads), size in grid(shorter=4):
        q, k, v = (
            randn(2, n, heads, size, dtype=torch.float64)
            for n, heads in ((q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads))
        )
        named = case.named(q_heads, 2)
        found, lse, rest = flash_attn_func(q, k, v, **named, return_attn_probs=True, mode="math")
        expected, expected_lse = reference(q, k, v, case, named.get("alibi_slopes"))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda said, at=case: f"{at}: {said}")
        torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)
        assert not rest.numel()


def test_a_window_of_any_integers() -> None:
    """flash-attention's own tests give a tensor of two."""
    q, k = randn(1, 5, 2, 16), randn(1, 8, 2, 16)
    expected = flash_attn_func(q, k, k, window_size=(3, 1), mode="math")
    for window in (torch.tensor([3, 1]), np.array([3, 1]), [np.int32(3), torch.tensor(1)]):
        assert torch.equal(flash_attn_func(q, k, k, window_size=window, mode="math"), expected)
    expected = flash_attn_func(q, k, k, window_size=(-1, 1), mode="naive")
    for left in (2**31, 2**63):  # more than a kernel's integers
        assert torch.equal(flash_attn_func(q, k, k, window_size=(left, 1), mode="naive"), expected)
    with pytest.raises(ArgumentError, match=r"`window_size` is \(1\.5, 0\); expected two ints"):
        flash_attn_func(q, k, k, window_size=(1.5, 0), mode="math")


@pytest.mark.parametrize("mode", tiers.cases(("naive", "tiled", "fused", "hopper"), quick=["naive"]))
def test_kernels_and_their_gradients(mode: str) -> None:
    q, k, v = randn(2, 21, 4, 24), randn(2, 30, 2, 24), randn(2, 30, 2, 16)
    named = GQA_WINDOW.named(4, 2)
    slopes = named["alibi_slopes"]
    found = results(lambda *t: flash_attn_func(*t, **named, mode=mode), (q, k, v))
    expected, usual = (
        results(lambda *t, p=p: reference(*t, GQA_WINDOW, slopes, p)[0], (q, k, v), p) for p in (torch.float64, torch.float16)
    )
    check(found, expected, usual)


def test_packed_tensors_are_read_in_place_and_have_gradients() -> None:
    qkv, kv = randn(1, 10, 3, 2, 16), randn(1, 13, 2, 2, 16)
    separate = results(lambda *t: flash_attn_func(*t, causal=True, mode="naive"), tuple(t.contiguous() for t in qkv.unbind(2)))
    together = results(lambda t: flash_attn_qkvpacked_func(t, causal=True, mode="naive"), (qkv,))
    assert torch.equal(together[0], separate[0])
    assert torch.equal(together[1], torch.stack(separate[1:], 2))
    q = qkv[:, :, 0]
    separate = results(lambda *t: flash_attn_func(*t, causal=True, mode="naive"), (q, *(t.contiguous() for t in kv.unbind(2))))
    together = results(lambda q, t: flash_attn_kvpacked_func(q, t, causal=True, mode="naive"), (q, kv))
    assert torch.equal(together[0], separate[0])
    assert torch.equal(together[2], torch.stack(separate[2:], 2))


@pytest.mark.long
def test_compiled_by_torch_without_a_break() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, left: int) -> torch.Tensor:
        return flash_attn_func(q, k, k, causal=True, window_size=(left, 0), mode="naive")

    compiled = torch.compile(attend, fullgraph=True, backend=BACKEND)
    q, k = randn(1, 10, 2, 16), randn(1, 13, 2, 16)
    for left in (2, 5):
        assert torch.equal(compiled(q, k, left), attend(q, k, left))


def test_what_is_refused() -> None:
    q = randn(1, 5, 2, 16)
    with pytest.raises(ArgumentError, match=r"dropout_p is 1\.5"):
        flash_attn_func(q, q, q, 1.5)
    with pytest.raises(ArgumentError, match=r"`qkv` is \[1, 5, 2, 16\]; expected \[batch, length, 3, heads, size\]"):
        flash_attn_qkvpacked_func(q)
    with pytest.raises(ArgumentError, match=r"`alibi_slopes` has elements of torch\.float16; expected torch\.float32"):
        flash_attn_func(q, q, q, alibi_slopes=q[0, 0, :, 0])
    with pytest.raises(ArgumentError, match=r"`alibi_slopes` is \[1, 1, 2\]; expected \[heads\] or \[batch, heads\]"):
        flash_attn_func(q, q, q, alibi_slopes=torch.ones(1, 1, 2))


@pytest.mark.long
@pytest.mark.parametrize("function", ["attention", "flash_attn_func"])
def test_numbers_of_a_module_are_constants_to_a_dynamic_compilation(function: str) -> None:
    """Symbols of torch.compile(dynamic=True) otherwise: the scale is part of a kernel."""

    class Layer(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            if function == "attention":
                return attention(q, q, q, scale=self.scale, mode="naive")
            return flash_attn_func(q, q, q, softmax_scale=self.scale, softcap=100 * self.scale, mode="naive")

    q = randn(1, 5, 2, 16)
    for scale in (0.25, 0.5):
        layer = Layer(scale)
        assert torch.equal(torch.compile(layer, fullgraph=True, dynamic=True, backend=BACKEND)(q), layer(q))


def test_the_operator_checks_the_range_of_its_integers() -> None:
    q = randn(1, 2, 5, 16)
    text = flash_text("naive", "dense", False, ("left",), 0.0, 0, None, False, torch.float16, 16, 16)
    with pytest.raises(ArgumentError, match="param `left` is 2147483648; expected at most 1073741824"):
        torch.ops.attngen.attention(q, q, q, text, [], [2**31], [])
