"""Mask tensors of `attention`: any that broadcasts, read as a vector of keys or rows if it is one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen  # noqa: E402
from attngen.torch import attention, functional  # noqa: E402
from tests.torch.tensors import BACKEND, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FP32 = {"atol": 1e-5, "rtol": 1e-5}
FULL = (2, 3, 5, 9)  # shape of a mask: batch, heads, q_len, kv_len


def problem(batch: int = 2, kv_len: int = 9) -> tuple[torch.Tensor, ...]:
    """q, k and v."""
    shapes = ((batch, 3, 5, 8), (batch, 3, kv_len, 8), (batch, 3, kv_len, 8))
    return tuple(randn(*shape, dtype=torch.float32) for shape in shapes)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    """By the schedule that compiles fastest."""
    return attention(q, k, v, attn_mask=mask, mode="naive")


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch's attention; a row without keys is 0."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num()


def mask_of(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    mask = randn(*shape, dtype=torch.float32)
    return mask > -0.8 if kind == "bool" else mask


@pytest.mark.parametrize("shape", [(5, 9), (1, 9), (5, 1), (3, 5, 9), (1, 1, 9), FULL, (2, 1, 1, 9)])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks_of_any_broadcastable_shape(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = problem()
    mask = mask_of(shape, kind)
    torch.testing.assert_close(attend(q, k, v, mask), exact(q, k, v, mask), **FP32)
    of_arrays = attngen.attention(*(t.numpy() for t in (q, k, v, mask)), mode="naive")
    torch.testing.assert_close(torch.from_numpy(of_arrays), exact(q, k, v, mask), **FP32)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_gradients_beside_and_of_masks_that_are_the_same_along_any_axes(kind: str) -> None:
    for shape in product(*((1, n) for n in FULL)):
        inputs = [*(t.requires_grad_() for t in problem()), mask_of(shape, kind)]
        wanted = [t.requires_grad_() for t in inputs if t.is_floating_point()]
        found, expected = (torch.autograd.grad(function(*inputs).sin().sum(), wanted) for function in (attend, exact))
        torch.testing.assert_close(found, tuple(t.nan_to_num() for t in expected), **FP32)


def axes_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The axes of the masks of later calls, as they are found."""
    seen: list[str] = []
    found = functional.without_broadcasts

    def spied(mask: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, str]:
        result = found(mask, kv_len)
        seen.append(result[1])
        return result

    monkeypatch.setattr(functional, "without_broadcasts", spied)
    return seen


def test_few_forms_serve_all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a kernel to compile: none is for a single sequence, or a cache of one key."""
    seen = axes_of(monkeypatch)
    for batch, kv_len in ((2, 9), (1, 9), (2, 1)):
        q, k, v = problem(batch, kv_len)
        attend(q, k, v, torch.ones(batch, 1, 1, kv_len, dtype=torch.bool))
    assert set(seen) == {"bk"}


def test_expanded_masks_are_read_as_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = axes_of(monkeypatch)
    q, k, v = problem()
    for kind in ("bool", "added"):
        mask = mask_of((2, 1, 1, 9), kind).expand(FULL)
        torch.testing.assert_close(attend(q, k, v, mask), exact(q, k, v, mask), **FP32)
    assert seen == ["bk", "bk"]
    of_arrays = attngen.attention(*(t.numpy() for t in (q, k, v, mask)), mode="naive")
    torch.testing.assert_close(torch.from_numpy(of_arrays), exact(q, k, v, mask), **FP32)
    own = mask_of((9,), "added").expand(FULL).detach().requires_grad_()  # each element of it has a gradient
    base = mask_of((9,), "added").requires_grad_()
    for leaf, made in ((own, own), (base, base.expand(FULL))):
        found, expected = (
            torch.autograd.grad(function(q, k, v, made).sin().sum(), leaf, retain_graph=True) for function in (attend, exact)
        )
        torch.testing.assert_close(found, expected, **FP32)


def _compiled(*_: torch.Tensor) -> Callable[..., Any]:
    return torch.compile(attend, fullgraph=True, dynamic=True, backend=BACKEND)


def _exported(*example: torch.Tensor) -> Callable[..., Any]:
    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return attend(*tensors)

    batch, keys = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("keys", min=2, max=512)
    dims = ({0: batch}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch, 3: keys})
    return torch.export.export(Module(), example, dynamic_shapes=(dims,)).module()


def _traced(*example: torch.Tensor) -> Callable[..., Any]:
    return torch.jit.trace(attend, example, check_trace=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", [_compiled, _exported, _traced])
def test_a_trace_with_an_expanded_mask_is_right_for_another(trace: Callable[..., Callable[..., Any]]) -> None:
    """Exported and traced graphs are called with strides that nobody compares with those of the example."""
    q, k, v = problem()
    mask = mask_of((2, 1, 1, 9), "bool").expand(2, 3, 5, 9)
    call = trace(q, k, v, mask)
    for other in (mask, mask_of(FULL, "bool")):
        torch.testing.assert_close(call(q, k, v, other), exact(q, k, v, other), **FP32)


def test_sizes_that_torch_compile_knows_or_does_not_know() -> None:
    call = _compiled()
    for batch, kv_len in ((2, 9), (3, 7), (4, 11)):
        q, k, v = problem(batch, kv_len)
        mask = mask_of((batch, 1, 1, kv_len), "bool")
        torch.testing.assert_close(call(q, k, v, mask), exact(q, k, v, mask), **FP32)
    torch._dynamo.reset()
    for tensor, dim in ((k, 2), (v, 2), (mask, 3)):
        torch._dynamo.decorators.mark_unbacked(tensor, dim)
    found = torch.compile(attend, fullgraph=True, backend=BACKEND)(q, k, v, mask)
    torch.testing.assert_close(found, exact(q, k, v, mask), **FP32)


def test_tiles_of_padding_are_skipped() -> None:
    """NaN in a value that is read reaches the rows of its tile, whatever its weight."""
    q, k = randn(2, 2, 16, 16), randn(2, 2, 512, 16)
    v, lengths = k.clone(), torch.tensor([256, 100])
    keep = (torch.arange(512) < lengths[:, None])[:, None, None]
    expected = exact(q.float(), k.float(), v.float(), keep)
    v[:, :, 256:] = float("nan")
    for mask in (keep, keep.expand(2, 2, 16, 512)):
        torch.testing.assert_close(attention(q, k, v, attn_mask=mask, mode="fused").float(), expected, atol=4e-3, rtol=0)
