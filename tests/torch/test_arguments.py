"""attngen.torch's arguments: shapes, layouts and masks that are taken, and what is refused, by name."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

import attngen.torch  # noqa: E402
from attngen import ArgumentError, DiagnosticError  # noqa: E402
from attngen.torch import (  # noqa: E402
    Attention,
    activated,
    attention,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flex_attention,
)
from attngen.torch.operator import attention_operator  # noqa: E402
from tests.torch.tensors import BACKEND, close, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_arguments_of_torch_in_its_order_for_tensors_of_any_rank() -> None:
    for shape in ((2, 4, 20, 16), (4, 20, 16), (20, 16)):
        q = randn(*shape)
        mask = randn(*shape[:-2], 20, 20) > -1
        expected = scaled_dot_product_attention(q, q, q, mask, 0.0, False, scale=0.3, enable_gqa=len(shape) > 2)
        for function in (attention, attngen.attention):
            close(function(query=q, key=q, value=q, attn_mask=mask, scale=0.3), expected)
            close(function(q, q, q, mask, 0.0, False, np.float32(0.3), len(shape) > 2), expected)
        output, lse = attention(q, q, q, mask, return_lse=True)
        assert (output.shape, lse.shape) == (shape, shape[:-1])
    q = randn(20, 4, 16)
    by_heads = scaled_dot_product_attention(*[q.transpose(0, 1)] * 3, is_causal=True)
    close(attention(q, q, q, is_causal=True, layout="bshd"), by_heads.transpose(0, 1))
    close(Attention(mask="causal", layout="bshd")(q, q, q), by_heads.transpose(0, 1))


def test_keys_and_values_of_batch_1_serve_every_batch() -> None:
    q, k = randn(3, 4, 20, 16), randn(1, 4, 20, 16)
    expected = scaled_dot_product_attention(q, k.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1))
    close(attention(q, k, k), expected)
    close(torch.compile(attention, fullgraph=True, dynamic=True, backend=BACKEND)(q, k, k), expected)


def test_a_packed_projection_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = randn(2, 20, 3, 4, 16)
    q, k, v = packed.unbind(2)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)  # a copy would call it
    o = attention(q, k, v, is_causal=True, layout="bshd")
    assert o.shape == (2, 20, 4, 16)
    assert o.is_contiguous()
    monkeypatch.undo()
    expected = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    close(o, expected.transpose(1, 2))


def test_outputs_lie_in_memory_as_queries_do() -> None:
    q = randn(2, 20, 4, 16).transpose(1, 2)
    assert attention(q, q, q).transpose(1, 2).is_contiguous()
    assert attention(q.contiguous(), q, q).is_contiguous()


def test_a_copy_is_an_error_unless_asked_for() -> None:
    q = randn(2, 4, 20, 32)[..., ::2]
    k = randn(2, 4, 20, 16)
    with pytest.raises(ArgumentError, match="stride 2"):
        attention(q, k, k, mode="fused")
    expected = attention(q.contiguous(), k, k, mode="fused")
    assert torch.equal(attention(q, k, k, mode="fused", copy=True), expected)
    shifted = randn(2 * 4 * 20 * 16 + 1)[1:].view(2, 4, 20, 16)
    assert torch.equal(attention(shifted, k, k, copy=True), attention(shifted.clone(), k, k))


def test_tensors_may_start_anywhere() -> None:
    """Kernels copy 16 bytes at a time. torch.compile does not know where the tensors of later calls start."""
    memory = torch.zeros(2 * 9 * 16 + 2).numpy()  # where a tensor starts is not always an offset within its storage
    copying = partial(attention, copy=True)
    functions = (
        Attention(copy=True),
        lambda *qkv: flash_attn_func(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2),
        flex_attention,
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv),  # as activate() replaces it
    )
    compiled = torch.compile(lambda *qkv: [f(*qkv) for f in (copying, *functions)], backend=BACKEND, fullgraph=True)
    for start in (0, 1, 2):
        q = torch.from_numpy(memory[start : start + 2 * 9 * 16]).view(1, 2, 9, 16).copy_(randn(1, 2, 9, 16))
        k, v = randn(2, 1, 2, 9, 20, dtype=q.dtype)[..., start : start + 16]
        own, others = ([t.detach().requires_grad_() for t in (q, k, v)] for _ in range(2))
        found, expected = copying(*own), scaled_dot_product_attention(*others)
        gradients = [torch.autograd.grad(o.square().sum(), of) for o, of in ((found, own), (expected, others))]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
        with activated(emulated=True):
            for output in compiled(q, k, v):
                close(output, expected.detach(), 1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 20, 16), (2, 4, 0, 16)])
def test_empty_batches_give_empty_results(shape: tuple[int, ...]) -> None:
    k = randn(shape[0], 4, 20, 16)
    assert attention(randn(*shape), k, k).shape == shape


def test_meta_tensors_have_shapes() -> None:
    q = torch.empty(2, 4, 10, 16, device="meta", dtype=torch.bfloat16)
    for mode in ("auto", "math"):
        output, lse = attention(q, q, q, return_lse=True, mode=mode)
        assert (output.shape, output.device.type, output.dtype) == (q.shape, "meta", torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)


def test_what_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.device.emulated import EmulatedDevice

    monkeypatch.setattr(EmulatedDevice, "compile", None)
    own = torch.zeros(5)
    q, score = randn(1, 2, 9, 48), Attention(score=lambda s, b, h, q, k: s + own[q])
    for call, said in (
        (lambda: attention(q, q, q, torch.ones(5, 5, dtype=torch.bool)), "`attn_mask`.*expected q_len = 9"),
        (lambda: attngen.attention(*[q.numpy()] * 3, np.ones((5, 5), bool)), "`attn_mask`.*expected q_len = 9"),
        (lambda: attention(q, q[:, :, :7], q), "`v`.*expected kv_len = 7"),
        (lambda: attention(q[..., ::2], q[..., ::2], q), "`q` has stride 2"),
        (lambda: Attention(mask="q - k < n", params={"n": "int"})(q, q, q), "param `n` has no default"),
        (lambda: score(q, q, q), "index 0 of `own`"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()


def test_forward_mode_is_refused() -> None:
    """A kernel does not see tangents: without a refusal, the derivative would silently be zero."""
    q, k = randn(1, 1, 8, 16), randn(1, 1, 8, 16)
    layer = Attention(mask="causal")
    for call in (attention, layer):
        call(q, k, k)  # so that the next call could be repeated from memory
        with pytest.raises(ArgumentError, match="`q` has a tangent"):
            torch.func.jvp(lambda q, call=call: call(q, k, k), (q,), (q,))
        with forward_ad.dual_level(), pytest.raises(ArgumentError, match="`k` has a tangent"):
            call(q, forward_ad.make_dual(k, k), k)
        torch.testing.assert_close(torch.vmap(lambda q, call=call: call(q, k, k))(q[None])[0], call(q, k, k))


def _of_size_16() -> Attention:
    """A layer of a spec, whose scale is that of its own head size."""
    return Attention(attngen.define(head_dim=16, mask="causal"), mode="naive")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q: attention(q, q, q, mode="fast"), ArgumentError, "mode is 'fast'"),
        (lambda q: attention(q, q, q, mode=["naive"]), ArgumentError, r"mode is \['naive'\]"),
        (lambda q: attention(q, q, q, layout="hbsd"), ArgumentError, "layout is 'hbsd'"),
        (lambda q: attention(q[0], q, q), ArgumentError, "`q` has 3 dimensions and `k` has 4"),
        (lambda q: attention(q[0, 0, 0], q, q), ArgumentError, "`q` has 1 dimension; expected 2 to 4"),
        (lambda q: attention(*[randn(1, 2, 4, 580)] * 3), DiagnosticError, "its heads have at most 576 elements"),
        (lambda q: attention(q, q, randn(*q.shape[:3], 580)), DiagnosticError, "its heads have at most 576 elements"),
        (lambda q: attention(q, q, q, mask=None), TypeError, "no keyword `mask`; torch's name for it is `attn_mask`"),
        (lambda q: attention(q, q, q, is_casual=True), TypeError, "did you mean `is_causal`"),
        (lambda q: attention(q, q, q, dropout_p=1.0), ArgumentError, "dropout_p is 1.0"),
        (lambda q: attention(q, q, q, dropout_p="0.1"), TypeError, "dropout_p is a str"),
        (lambda q: attention(q, q, q, dropout_p=None), TypeError, "dropout_p is a NoneType"),
        (lambda q: attention(q, q, q, dropout_p=0.5, offset=3), ArgumentError, "`offset` was given without `seed`"),
        (lambda q: attention(q, q, q, None, 0.0, 0.25), TypeError, "`is_causal` is 0.25; expected True or False"),
        (lambda q: attngen.attention(*[q.numpy()] * 3, is_causal="no"), TypeError, "`is_causal` is 'no'"),
        (lambda q: attention(q, q, q, enable_gqa=None), TypeError, "`enable_gqa` is None"),
        (
            lambda q: attention(q, q, q, scale=torch.tensor(0.3)),
            ArgumentError,
            r"`scale` is a Tensor; expected a number\. Multiply the query by it, and pass scale=1\.0",
        ),
        (lambda q: attention(q, q, q, scale=[0.3]), ArgumentError, r"`scale` is \[0.3\]; expected a number"),
        (lambda q: attention(q, q, q, layout=["bhsd"]), ArgumentError, "layout is"),
        (lambda q: attention(q, q.float(), q, mode="math"), TypeError, "`k` has elements of torch.float32; expected"),
        (lambda q: attention(q.float(), q.float(), q.double(), mode="math"), TypeError, "`v` has elements of torch.float64"),
        (lambda q: attention(q, q, q, torch.ones(9, 9, dtype=torch.int32)), TypeError, "`attn_mask` has elements of int32"),
        (lambda q: attention(q, q, q, torch.ones(9, 9).double()), TypeError, "`attn_mask` has elements of float64"),
        (lambda q: attention(q, q, q, [[True]]), TypeError, "`attn_mask` is a list"),
        (lambda q: Attention(mask="true", normalize="sigmoid", return_lse=True), DiagnosticError, "lse"),
        (lambda q: attention(q, q[:, :1], q[:, :1]), ArgumentError, "enable_gqa=True"),
        (lambda q: attention(q, q.float(), q), ArgumentError, "`k` has elements of fp32"),
        (lambda q: attention(q.double(), q.double(), q.double()), ArgumentError, "`q` has elements of float64"),
        (lambda q: attention(q[..., :12], q[..., :11], q), ArgumentError, "`k` has a head size of 11; expected that of q, 12"),
        (lambda q: attention(q, q, q, torch.ones(5, 5, dtype=torch.bool)), ArgumentError, "attn_mask"),
        (lambda q: attention(q, q, q, torch.ones(1, 1, 1, 1, 9)), ArgumentError, "5 dimensions"),
        (lambda q: Attention(maks="causal"), TypeError, "Attention has no keyword `maks`; did you mean `mask`"),
        (lambda q: Attention(mask="causl"), DiagnosticError, "did you mean `causal`"),
        (lambda q: Attention(attngen.define(), is_causal=True), ArgumentError, "the spec states"),
        (lambda q: Attention(mask="causal")(q, q, q, torch.ones(9, 9)), ArgumentError, "its own mask"),
        (lambda q: Attention()(q, q, q, window=3), ArgumentError, "no input or param `window`"),
        (lambda q: _biased()(q, q, q, x=torch.ones(2).half()), TypeError, "Convert it, or declare `x` as fp16 in the spec"),
        (lambda q: Attention(mask="causal")(None, q, q), TypeError, "`q` is a NoneType; expected a tensor"),
        (lambda q: torch.fx.symbolic_trace(Attention(mask="causal")), TypeError, "`q` is a Proxy of torch.fx.symbolic_trace"),
        (lambda q: Attention(mask="causal", return_lse=1), TypeError, "`return_lse` is 1; expected True or False"),
        (lambda q: Attention(mask="causal", deterministic="no"), TypeError, "`deterministic` is 'no'"),
        (lambda q: Attention(mask="causal", dropout="p"), TypeError, "dropout is a str; expected a number"),
        (lambda q: attngen.define(dropout=lambda: 0.5), TypeError, "the dropout is a number or text, no function"),
        (lambda q: attention(q, q, q, deterministic="no"), TypeError, "`deterministic` is 'no'"),
        (lambda q: flash_attn_func(q, q, q, softmax_scale=True), TypeError, "`softmax_scale` is a bool"),
        (lambda q: flash_attn_func(q, q, q, return_attn_probs=1), TypeError, "`return_attn_probs` is 1"),
        (lambda q: flash_attn_func(q[0, 0, 0, 0], q, q), ArgumentError, "`q` has 0 dimensions"),
        (
            lambda q: flash_attn_func(q[..., :13], q[..., :12], q),
            ArgumentError,
            "`k` has a head size of 12; expected that of q, 13",
        ),
        (lambda q: _packed(q[0, :, :, :13], q[0, :, :, :12], q[0]), ArgumentError, "`k` has a head size of 12; expected that"),
        (lambda q: flash_attn_qkvpacked_func(q.tolist()), TypeError, "`qkv` is a list; expected a tensor"),
        (lambda q: flex_attention(q.numpy(), q, q), TypeError, "`query` is a ndarray; expected a tensor"),
        (lambda q: flex_attention(q, q, q, return_aux=True), TypeError, "`return_aux` is a bool; expected an AuxRequest"),
        (lambda q: flex_attention(q, q, q, sinks=[0.5, 0.5]), TypeError, "`sinks` is a list; expected a tensor"),
        (lambda q: _of_size_16()(q[..., :13], q[..., :13], q), ArgumentError, "dimension 3 is 13, expected head_dim = 16"),
        (lambda q: _of_size_16()(q, q, q[..., :13]), ArgumentError, "dimension 3 is 13, expected head_dim_v = 16"),
    ],
)
def test_mistakes_are_named(call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(randn(1, 2, 9, 16))


def _biased() -> Attention:
    return Attention(score="s + x[h]", inputs={"x": ("fp32", ("heads",))})


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    begins = torch.tensor([0, 2], dtype=torch.int32)
    return flash_attn_varlen_func(q, k, v, begins, begins, 2, 2)


def test_what_torch_hides_in_a_tensor_is_not_lost() -> None:
    """Fake, meta, sparse and batched tensors are refused, or supported, where a kernel would read their memory."""
    q = randn(1, 2, 8, 16)
    spec = attngen.define(head_dim=16)
    kernel = attngen.compile(spec, device="emulated", kernel="naive")
    with FakeTensorMode():
        fake = torch.empty(1, 2, 8, 16, dtype=torch.float16)
    nested = torch.nested.nested_tensor([q[0], q[0, :, :3]])  # it has no sizes
    for call, said in (
        (lambda: attention(q, q.to("meta"), q), "`k` is on meta"),
        (lambda: kernel(q, q, q, out=fake), "`out` is a tensor without memory"),
        (lambda: torch.vmap(lambda x: kernel(x, x, x, out=q))(q[None]), "`q` is a tensor without memory"),
        (lambda: attention(q.to_sparse(), q, q), "`q` is a sparse tensor"),
        (lambda: attention(q, q.to_sparse(), q, copy=True), "`k` is a sparse tensor"),
        (lambda: attention(q[0, 0], q[0, 0].to_sparse_csr(), q[0, 0]), "`k` is a sparse tensor"),
        (lambda: attention(q, q, q, torch.ones(8, 8).to_sparse_csr()), "`attn_mask` is a sparse tensor"),
        (lambda: attention(*3 * [nested], copy=True), "`q` is a nested tensor.* packed for flash_attn_varlen_func: q.values"),
        (lambda: attention(*3 * [nested]), "`q` is a nested tensor"),
        (lambda: flash_attn_func(q, nested, nested), "`k` is a nested tensor"),
        (lambda: kernel(q, q.to_sparse(), q), "`k` is a sparse tensor"),
        (lambda: kernel(q, q, q, out=torch.empty_like(q), stream="main"), "`stream` is 'main'"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()
    each = torch.vmap(lambda x: attention(x, x, x))(torch.stack([q, -q]))
    close(each[1], scaled_dot_product_attention(-q, -q, -q))


def test_masks_that_only_the_dispatcher_can_read() -> None:
    """Negated views and subclasses, beside plain tensors."""
    q, bias = randn(1, 2, 8, 16), torch.randn(8, 8, dtype=torch.complex64)
    negated = bias.conj().imag
    assert negated.is_neg()
    expected = attention(q, q, q, -bias.imag, mode="naive")
    assert torch.equal(attention(q, q, q, negated, mode="naive"), expected)
    pair = TwoTensor(-bias.imag, bias.imag.contiguous())
    assert torch.equal(attention(q, q, q, pair, mode="naive").a, expected)


def test_an_output_on_an_input_is_refused() -> None:
    kernel = attngen.compile(attngen.define(dtype="fp16", head_dim=16), kernel="naive", device="emulated")
    memory = randn(4, 1, 1, 8, 16)
    q, k, v = memory[:3]
    for arrays in ((q, k, v), tuple(t.numpy() for t in (q, k, v))):
        for out in arrays:
            with pytest.raises(ArgumentError, match="share memory"):
                kernel(*arrays, out=out)
    with pytest.raises(ArgumentError, match="`out` and `v` share memory"):
        kernel(q, k, v, out=memory.flatten()[264:392].view_as(q))


def test_the_operator_takes_one_attention() -> None:
    q = randn(1, 1, 8, 16)
    two = "attention one { dtype fp16 head_dim 16 } attention two { dtype fp16 head_dim 16 }"
    with pytest.raises(ArgumentError, match="one attention, not 2"):
        attention_operator(q, q, q, two)
    with pytest.raises(ArgumentError, match="1 ints were given"):
        attention_operator(q, q, q, "attention a { dtype fp16 head_dim 16 }", [], [3])
