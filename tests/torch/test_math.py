"""mode="math": any spec by torch's own operations, in every transform of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.reference.torch_oracle import torch_attention  # noqa: E402
from attngen.torch import Attention, attention  # noqa: E402
from tests.torch.specs import CASES, KV_LEN, Q_LEN, Case  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention


def layer_of(case: Case) -> Attention:
    return Attention(case.spec(), mode="math")


def function_of(case: Case) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """(a function of the tensors that require grad, these tensors)."""
    layer, tensors = layer_of(case), case.tensors()
    names = [n for n, t in tensors.items() if t.requires_grad]
    fixed = {n: t for n, t in tensors.items() if not t.requires_grad}

    def function(*values: torch.Tensor) -> Any:
        given = dict(zip(names, values, strict=True)) | fixed
        q, k, v = (given.pop(n) for n in ("q", "k", "v"))
        return layer(q, k, v, **given)

    return function, tuple(tensors[n] for n in names)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_derivatives_of_every_class(case: Case) -> None:
    """Results and gradients against the oracle and finite differences; no NaN behind masks or in rows without keys."""
    function, tensors = function_of(case)
    named = {n: t.detach() for n, t in case.tensors().items()}
    q, k, v = (named.pop(n) for n in ("q", "k", "v"))
    output, lse = torch_attention(case.spec(), q, k, v, inputs=named)
    found = function(*tensors)
    expected = (output, lse) if case.spec().lse else output
    torch.testing.assert_close(found, expected)

    def finite(*values: torch.Tensor) -> Any:
        """An lse of -inf has no finite differences."""
        found = function(*values)
        return (found[0], found[1].clamp(min=-9.0)) if case.spec().lse else found

    assert torch.autograd.gradcheck(finite, tensors, fast_mode=True, check_forward_ad=True)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_second_derivatives_of_every_class(case: Case) -> None:
    function, tensors = function_of(case)
    first = function if not case.spec().lse else lambda *t: function(*t)[0]
    assert torch.autograd.gradgradcheck(first, tensors, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_elements_of_every_type_are_as_exact_as_torch(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 4, 9, 16).to(dtype), torch.randn(2, 2, 11, 16).to(dtype)
    exact = sdpa(q.double(), k.double(), k.double(), is_causal=True, enable_gqa=True)
    found = attention(q, k, k, is_causal=True, enable_gqa=True, mode="math")
    assert found.dtype is dtype
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = sdpa(q, k, k, is_causal=True, enable_gqa=True)
    limit = (theirs.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps
    assert (found.double() - exact).abs().max() <= limit


def test_large_scores_lose_nothing() -> None:
    """One fp32 number cannot hold the lse of a row whose scores are all the smallest number: weights do not come from it."""
    q = torch.randn(1, 1, 4, 8)
    bias = torch.full((4, 4), torch.finfo(torch.float32).min)
    found = attention(torch.zeros_like(q), q, q, attn_mask=bias, mode="math")
    torch.testing.assert_close(found, q.mean(2, keepdim=True).expand_as(q))


def test_params_may_be_tensors_that_have_gradients() -> None:
    layer = Attention(score="s * c", params={"c": ("float", 1.0)}, mode="math")
    q, c = torch.randn(1, 1, 5, 8, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c: layer(q, q, q, c=c), (c,))
    with pytest.raises(ArgumentError, match=r"`c` is a tensor \[2\]"):
        layer(q, q, q, c=torch.ones(2))
    with pytest.raises(ArgumentError, match=r"`input c: fp32\[\]`; only mode=\"math\""):
        Attention(score="s * c", params={"c": ("float", 1.0)})(q.float(), q.float(), q.float(), c=c)


def test_every_transform_of_torch() -> None:
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    layer = Attention(mask="causal", score="alibi(slopes)", inputs={"slopes": ("fp32", ("heads",))}, mode="math")
    q = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)

    def attend(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return layer(q, q, q, slopes=slopes)

    def loss(slopes: torch.Tensor, q: torch.Tensor = q[0]) -> torch.Tensor:
        return attend(q, slopes).sin().sum()

    torch.testing.assert_close(torch.vmap(lambda x: attend(x, slopes))(q), torch.stack([attend(x, slopes) for x in q]))
    many = torch.stack([slopes, 2 * slopes])
    torch.testing.assert_close(torch.vmap(loss)(many), torch.stack([loss(s) for s in many]))
    by_sample = torch.vmap(torch.func.grad(loss, argnums=1), in_dims=(None, 0))(slopes, q)
    torch.testing.assert_close(by_sample[1], torch.func.grad(loss, argnums=1)(slopes, q[1]))
    hessian = torch.func.hessian(loss)(slopes)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, slopes))
    masks = torch.rand(3, 5, 5) < 0.7
    found = torch.vmap(lambda m: attention(q[0], q[0], q[0], attn_mask=m, mode="math"))(masks)
    torch.testing.assert_close(found, torch.stack([sdpa(q[0], q[0], q[0], attn_mask=m) for m in masks]).nan_to_num())


@pytest.mark.long
def test_compiled_gradients_of_elements_with_a_constant_index() -> None:
    torch._dynamo.reset()
    inputs = {"places": ("fp32", ("batch", "kv_len", 2)), "c": ("fp32", (1,))}
    layer = Attention(score="s + places[b, k, 1] * c[0]", inputs=inputs, mode="math")
    q, places, c = (torch.randn(shape, requires_grad=True) for shape in ((2, 1, 6, 8), (2, 6, 2), (1,)))
    call = lambda f: torch.autograd.grad(f(q, q, q, places=places, c=c).square().sum(), (q, places, c))  # noqa: E731
    torch.testing.assert_close(call(torch.compile(layer, backend="aot_eager")), call(layer))


@pytest.mark.long
def test_compiled_without_a_break_and_exported() -> None:
    torch._dynamo.reset()
    layer = Attention(mask="causal and q - k < n", score="s * c", params={"n": ("int", 3), "c": ("float", 0.5)}, mode="math")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (6, 9):
        q = torch.randn(1, 2, length, 8, requires_grad=True)
        c = torch.tensor(0.25, requires_grad=True)
        expected, found = layer(q, q, q, c=c), compiled(q, q, q, c=c)
        torch.testing.assert_close(found, expected)
        (of_q, of_c), (q_found, c_found) = (torch.autograd.grad(o.sum(), (q, c)) for o in (expected, found))
        torch.testing.assert_close((q_found, c_found), (of_q, of_c))
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(layer, (q, q, q), dynamic_shapes=({2: length},) * 3).module()
    other = torch.randn(1, 2, 13, 8)
    torch.testing.assert_close(exported(other, other, other), layer(other, other, other))


def test_mistakes_are_named_and_other_ways_lead_here() -> None:
    q = torch.randn(1, 2, 5, 8)
    kernel = attngen.compile(
        attngen.define(dtype="fp32", head_dim=8, mask="causal", lse=True, kernel="naive"), device="emulated"
    )
    for found, expected in zip(kernel.math(q, q, q), kernel(q, q, q), strict=True):
        torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # does not reach into the operator
        assert torch.equal(kernel.math(q, q, q)[0], kernel.math(q, q, q)[0].float())
    for call, said in (
        (lambda: attention(q, q, q[:, :, :3], mode="math"), "`v`.*expected kv_len = 5"),
        (lambda: attention(q, q, q, torch.ones(3, 3, dtype=torch.bool), mode="math"), "`attn_mask`.*expected q_len = 5"),
        (lambda: attention(q, q, q, mode="maths"), "auto or math"),
        (lambda: replace(kernel, on_tensors=None).math(q, q, q), "needs attngen.torch: import it before"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()


@pytest.mark.parametrize("storage", ["packed", "padded", "paged"])
def test_storages_that_it_does_not_compute_are_refused(storage: str) -> None:
    kernel = attngen.compile(attngen.define(dtype="fp32", head_dim=8), kernel="naive", device="emulated", storage=storage)
    lengths = torch.tensor([2, 3], dtype=torch.int32)
    named = {
        "packed": {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_q_len": 3, "max_kv_len": 3},
        "padded": {"seqused": lengths},
        "paged": {"seqused": lengths, "page_table": lengths[:, None]},
    }
    q = torch.zeros(3, 2, 8) if storage == "packed" else torch.zeros(2, 2, 3, 8)
    with pytest.raises(ArgumentError, match=f"dense storage alone, and this attention has storage {storage}"):
        kernel.math(q, q, q, **named[storage])


def test_keys_that_no_row_sees_leave_no_trace() -> None:
    """Uninitialized padding, with grouped heads and a mask per head."""
    q, k = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    lengths, reach = torch.tensor([4, 2], dtype=torch.int32), torch.tensor([3, 4, 2, 3], dtype=torch.int32)
    declared = {"lengths": ("int32", ("batch",)), "reach": ("int32", ("heads",))}
    layer = Attention(mask="padding(lengths) and k < reach[h]", inputs=declared, mode="math", enable_gqa=True)

    def results(behind: float) -> tuple[torch.Tensor, ...]:
        padded = k.clone()
        padded[0, 0, 4:] = padded[0, 1, 3:] = padded[1, :, 2:] = behind
        tensors = (q.clone().requires_grad_(), padded.requires_grad_())
        output = layer(*tensors, padded, lengths=lengths, reach=reach)
        return output, *torch.autograd.grad(output.sin().sum(), tensors)

    torch.testing.assert_close(results(torch.nan), results(0.0))


def test_nothing_to_attend_to() -> None:
    q, none = torch.randn(1, 2, Q_LEN, 8, requires_grad=True), torch.randn(1, 2, 0, 8)
    assert not attention(q, none, none, mode="math").any()
    masked = attention(q, q, q, torch.zeros(Q_LEN, Q_LEN, dtype=torch.bool), mode="math")
    (gradient,) = torch.autograd.grad(masked.sum(), q)
    assert not masked.any()
    assert not gradient.any()
    assert attention(q[:0], q[:0], q[:0], mode="math").shape == (0, 2, Q_LEN, 8)
    assert attention(q, *[torch.randn(1, 2, KV_LEN, 8)] * 2, mode="math").shape == q.shape
