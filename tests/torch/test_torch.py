"""attngen.torch on the CPU: the same operator, run by the emulated device."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen.torch  # noqa: E402
from attngen import ArgumentError, DiagnosticError  # noqa: E402
from attngen.torch import (  # noqa: E402
    Attention,
    attention,
    operator,
)
from attngen.torch.description import fixed_text  # noqa: E402
from attngen.torch.operator import attention_operator  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.gpt import pair  # noqa: E402

BACKEND = "aot_eager"  # traces and functionalizes as the default does, and leaves code generation out


def randn(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-3) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).abs().max()) < tolerance


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("mode", tiers.cases(["auto", "naive", "tiled", "fused"], quick=["auto"]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_agrees_with_torch(mode: str, dtype) -> None:
    q, k, v = randn(2, 4, 33, 16, dtype=dtype), randn(2, 2, 40, 16, dtype=dtype), randn(2, 2, 40, 24, dtype=dtype)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    close(attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True, mode=mode), expected, tolerance)


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


def test_the_emulated_device_says_once_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.device import choose
    from attngen.torch import runtime

    q = randn(1, 1, 8, 16)
    spec = attngen.define(head_dim=16)

    def warnings_of(*calls) -> list[warnings.WarningMessage]:
        monkeypatch.setattr(choose._Said, "emulated", False)
        monkeypatch.setattr(choose, "has_gpu", lambda: False)
        monkeypatch.setattr(runtime, "runtimes", {})
        monkeypatch.setattr(operator, "runtimes", runtime.runtimes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", attngen.EmulatedDeviceWarning)
            for call in calls:
                call()
        return [w for w in caught if w.category is attngen.EmulatedDeviceWarning]

    for call in (
        lambda: attention(q, q, q),
        lambda: Attention(mask="causal")(q, q, q),
        lambda: attngen.attention(*[q.numpy()] * 3),
        lambda: attngen.compile(spec)(*[q.numpy()] * 3),
        lambda: attngen.compile(spec)(q, q, q),
    ):
        (said,) = warnings_of(call, call, lambda: attention(q, q, q))
        assert said.filename == __file__
        assert "emulated device" in str(said.message)
    assert not warnings_of(lambda: attngen.compile(spec, device="emulated")(q, q, q), lambda: attention(q, q, q))


@pytest.mark.parametrize("shape", [(33, 40), (1, 40), (33, 1), (4, 33, 40), (1, 1, 40), (2, 4, 33, 40), (2, 1, 1, 40)])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks_of_any_broadcastable_shape(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = randn(2, 4, 33, 16), randn(2, 4, 40, 16), randn(2, 4, 40, 16)
    mask = randn(*shape, dtype=torch.float16)
    if kind == "bool":
        mask = mask > -1
    close(attention(q, k, v, attn_mask=mask), scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_a_packed_projection_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = randn(2, 20, 3, 4, 16)
    q, k, v = packed.unbind(2)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)  # a copy would need it
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


@pytest.mark.parametrize("shape", [(0, 4, 20, 16), (2, 4, 0, 16)])
def test_empty_batches_give_empty_results(shape: tuple[int, ...]) -> None:
    k = randn(shape[0], 4, 20, 16)
    assert attention(randn(*shape), k, k).shape == shape


def test_inputs_that_require_grad_are_refused_everywhere() -> None:
    q = randn(1, 1, 8, 16).requires_grad_()
    k = randn(1, 1, 8, 16)
    for call in (attention, torch.compile(attention, backend=BACKEND), Attention(mask="causal")):
        with pytest.raises(Exception, match="requires grad, and there is no backward kernel"):
            call(q, k, k)
    with torch.no_grad():
        attention(q, k, k)


def test_transforms_that_need_a_derivative_are_refused() -> None:
    """They unwrap tensors before the kernel sees them: without a refusal, gradients and tangents would be zero."""
    q, k = randn(1, 1, 8, 16), randn(1, 1, 8, 16)
    layer = Attention(mask="causal")
    for call in (attention, layer):
        call(q, k, k)  # so that the next call could be repeated from memory
        with pytest.raises(ArgumentError, match="requires grad, and there is no backward kernel"):
            torch.func.grad(lambda q, call=call: call(q, k, k).sum())(q)
        with pytest.raises(ArgumentError, match="`q` has a tangent"):
            torch.func.jvp(lambda q, call=call: call(q, k, k), (q,), (q,))
        with forward_ad.dual_level(), pytest.raises(ArgumentError, match="`k` has a tangent"):
            call(q, forward_ad.make_dual(k, k), k)
        torch.testing.assert_close(torch.vmap(lambda q, call=call: call(q, k, k))(q[None])[0], call(q, k, k))


def test_opcheck() -> None:
    spec = attngen.define(
        dtype="fp16", head_dim=16, mask="q >= k and q - k < n", score="s * c + bias[h]", lse=True,
        inputs={"bias": ("fp32", ("heads",))}, params={"n": ("int", 5), "c": ("float", 0.5)},
    )  # fmt: skip
    q, k = randn(2, 4, 20, 16), randn(2, 2, 24, 16)
    bias = torch.randn(4)
    for queries in (q, randn(2, 20, 4, 16).transpose(1, 2)):
        result = torch.library.opcheck(attention_operator, (queries, k, k, fixed_text(spec, "auto"), [bias], [5], [0.5]))
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_compiled_without_a_break_for_every_length(layout: str) -> None:
    from attngen.torch import runtime

    def function(q, k, v):
        return attention(q * 2, k, v, is_causal=True, layout=layout, scale=0.31) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=BACKEND)
    before = len(runtime.runtimes)
    for length in (5, 9, 17, 64, 100):
        shape = (2, length, 4, 16) if layout == "bshd" else (2, 4, length, 16)
        q = randn(*shape)
        close(compiled(q, q, q), function(q, q, q), 1e-6)
    assert len(runtime.runtimes) - before <= 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_layers_compile_and_export() -> None:
    slopes = torch.tensor([0.5, 0.25])
    layer = Attention(mask=lambda b, h, q, k: (q >= k) & (q - k < 8), score=lambda s, b, h, q, k: s + slopes[h] * (k - q))
    q = randn(1, 2, 30, 16)
    expected = layer(q, q, q)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=BACKEND)(q, q, q), expected)
    length = torch.export.Dim("length", min=2, max=1024)
    exported = torch.export.export(layer, (q, q, q), dynamic_shapes=({2: length}, {2: length}, {2: length}))
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    assert torch.equal(loaded(q, q, q), expected)
    other = randn(1, 2, 41, 16)
    assert torch.equal(loaded(other, other, other), layer(other, other, other))
    assert [name for name, _ in layer.named_buffers()] == ["slopes"]
    assert not list(layer.parameters())


def test_layers_take_inputs_and_params_by_name() -> None:
    layer = Attention(
        mask="causal and same_document(ids) and q - k < n",
        inputs={"ids": ("int32", ("batch", "kv_len"))},
        params={"n": ("int", 9)},
    )
    q = randn(2, 2, 20, 16)
    ids = torch.arange(20, dtype=torch.int32).div(7, rounding_mode="floor").expand(2, 20)
    at = torch.arange(20)
    for n in (9, 3):
        allowed = (at[:, None] >= at) & (ids[0][:, None] == ids[0]) & (at[:, None] - at < n)
        expected = scaled_dot_product_attention(q, q, q, attn_mask=allowed)
        close(layer(q, q, q, ids=ids, n=n), expected)
        close(torch.compile(layer, fullgraph=True, backend=BACKEND)(q, q, q, ids=ids, n=n), expected)
    with pytest.raises(ArgumentError, match="input `ids` was not given"):
        layer(q, q, q)
    with pytest.raises(ArgumentError, match="did you mean `ids`"):
        layer(q, q, q, id=ids)


def test_layers_of_specs_and_files() -> None:
    from tests.conftest import ROOT

    q = randn(1, 2, 20, 64)
    expected = scaled_dot_product_attention(q, q, q, is_causal=True)
    close(Attention(ROOT / "specs" / "gpt2.attn")(q, q, q), expected)
    layer = Attention(attngen.define(dtype="fp16", head_dim=64, mask="causal", lse=True), mode="tiled")
    output, lse = layer(q, q, q)
    close(output, expected)
    assert lse.shape == (1, 2, 20)
    with pytest.raises(ArgumentError, match="elements of fp32"):
        layer(q.float(), q.float(), q.float())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q: attention(q, q, q, mode="fast"), ArgumentError, "mode is 'fast'"),
        (lambda q: attention(q, q, q, layout="hbsd"), ArgumentError, "layout is 'hbsd'"),
        (lambda q: attention(q[0], q, q), ArgumentError, "`q` has 3 dimensions and `k` has 4"),
        (lambda q: attention(q[0, 0, 0], q, q), ArgumentError, "`q` has 1 dimension; expected 2 to 4"),
        (lambda q: attention(q, q, q, mask=None), TypeError, "no keyword `mask`; torch's name for it is `attn_mask`"),
        (lambda q: attention(q, q, q, is_casual=True), TypeError, "did you mean `is_causal`"),
        (lambda q: attention(q, q, q, dropout_p=0.1), ArgumentError, "dropout_p is 0.1"),
        (lambda q: attention(q, q, q, torch.ones(9, 9, dtype=torch.int32)), TypeError, "`attn_mask` has elements of int32"),
        (lambda q: attention(q, q, q, torch.ones(9, 9).double()), TypeError, "`attn_mask` has elements of float64"),
        (lambda q: attention(q, q, q, [[True]]), TypeError, "`attn_mask` is a list"),
        (lambda q: Attention(mask="true", normalize="sigmoid", return_lse=True), DiagnosticError, "lse"),
        (lambda q: attention(q, q[:, :1], q[:, :1]), ArgumentError, "enable_gqa=True"),
        (lambda q: attention(q, q.float(), q), ArgumentError, "`k` has elements of fp32"),
        (lambda q: attention(q.double(), q.double(), q.double()), ArgumentError, "`q` has elements of float64"),
        (lambda q: attention(q[..., :12], q[..., :12], q[..., :12]), DiagnosticError, "not a multiple of 8"),
        (lambda q: attention(q, q, q, torch.ones(5, 5, dtype=torch.bool)), ArgumentError, "attn_mask"),
        (lambda q: attention(q, q, q, torch.ones(1, 1, 1, 1, 9)), ArgumentError, "5 dimensions"),
        (lambda q: Attention(maks="causal"), TypeError, "Attention has no keyword `maks`; did you mean `mask`"),
        (lambda q: Attention(mask="causl"), DiagnosticError, "did you mean `causal`"),
        (lambda q: Attention(attngen.define(), is_causal=True), ArgumentError, "the spec states"),
        (lambda q: Attention(mask="causal")(q, q, q, torch.ones(9, 9)), ArgumentError, "a mask of its own"),
        (lambda q: Attention()(q, q, q, window=3), ArgumentError, "no input or param `window`"),
    ],
)
def test_mistakes_are_named(call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(randn(1, 2, 9, 16))


def test_what_torch_hides_in_a_tensor_is_not_lost() -> None:
    """Memory, a place, a layout; a derivative at the operator itself."""
    q = randn(1, 2, 8, 16)
    spec = attngen.define(head_dim=16)
    kernel = attngen.compile(spec, device="emulated", kernel="naive")
    text = fixed_text(spec, "naive")
    with FakeTensorMode():
        fake = torch.empty(1, 2, 8, 16, dtype=torch.float16)
    for call, said in (
        (lambda: torch.func.grad(lambda x: attention_operator(x, x, x, text)[0].sum())(q), "`q` requires grad"),
        (lambda: attention(q, q.to("meta"), q), "`k` is on meta"),
        (lambda: kernel(q, q, q, out=fake), "`out` is a tensor without memory"),
        (lambda: torch.vmap(lambda x: kernel(x, x, x, out=q))(q[None]), "`q` is a tensor without memory"),
        (lambda: attention(q.to_sparse(), q, q), "`q` is a sparse or nested tensor"),
        (lambda: kernel(q, q.to_sparse(), q), "`k` is a sparse or nested tensor"),
        (lambda: kernel(q, q, q, out=torch.empty_like(q), stream="main"), "`stream` is 'main'"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()
    each = torch.vmap(lambda x: attention(x, x, x))(torch.stack([q, -q]))
    close(each[1], scaled_dot_product_attention(-q, -q, -q))


def test_meta_tensors_have_shapes() -> None:
    q = torch.empty(2, 4, 10, 16, device="meta", dtype=torch.bfloat16)
    output, lse = attention(q, q, q, return_lse=True)
    assert (output.shape, output.device.type, output.dtype) == (q.shape, "meta", torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)


def test_numpy_captures_become_buffers() -> None:
    table = np.linspace(0, 1, 64, dtype=np.float32)
    layer = Attention(score=lambda s, b, h, q, k: s + table[k])
    q = randn(1, 1, 20, 16)
    bias = torch.as_tensor(table)[:20].expand(20, 20)
    close(layer(q, q, q), scaled_dot_product_attention(q.float(), q.float(), q.float(), attn_mask=bias))
    assert layer.table.dtype == torch.float32


def test_captured_tensors_of_every_rank_belong_to_the_layer() -> None:
    temperature, scale, slopes = torch.tensor(2.0), torch.tensor(0.5), torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    layer = Attention(score=lambda s, b, h, q, k: s * temperature + slopes[h] * scale * k, mask=lambda b, h, q, k: q - k < 7)
    assert set(layer.state_dict()) == {"slopes", "temperature", "scale"}
    assert [name for name, _ in layer.named_parameters()] == ["slopes"]
    q = randn(1, 2, 20, 16)
    at = torch.arange(20)

    def expected() -> torch.Tensor:
        bias = layer.slopes.float()[:, None, None] * layer.scale.float() * at
        bias = bias.masked_fill(at[:, None] - at >= 7, -torch.inf)
        return scaled_dot_product_attention(q * layer.temperature.item(), q, q, attn_mask=bias.half())

    with torch.no_grad():
        close(layer(q, q, q), expected())
        temperature.fill_(0)
        close(layer(q, q, q), expected())
        assert layer.temperature is temperature
        close(layer.half()(q, q, q), expected())
        layer.load_state_dict({"slopes": torch.zeros(2), "temperature": torch.tensor(1.0), "scale": torch.tensor(0.0)})
        close(layer(q, q, q), expected())
        close(torch.compile(layer, fullgraph=True, backend=BACKEND)(q, q, q), expected())
    with pytest.raises(ArgumentError, match="`slopes` requires grad"):
        layer(q, q, q)
    half = temperature
    with pytest.raises(ArgumentError, match="captured array is called `half`"):
        Attention(score=lambda s, b, h, q, k: s * half)


def test_numpy_captures_that_torch_cannot_share() -> None:
    table = np.linspace(0, 1, 64, dtype=np.float32)[::-1]
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    layer = Attention(score=lambda s, b, h, q, k: s + table[k] * fixed[0])
    q = randn(1, 1, 20, 16)
    bias = torch.from_numpy(table[:20].copy()).expand(20, 20)
    close(layer(q, q, q), scaled_dot_product_attention(q, q, q, attn_mask=bias.half()))


def test_parameters_do_not_keep_a_call_from_being_repeated() -> None:
    assert operator.are_plain((torch.nn.Parameter(randn(2)), randn(2)))
    assert not operator.are_plain((torch._neg_view(randn(2)),))


def test_is_causal_beside_a_mask_is_both_of_them() -> None:
    q = randn(1, 1, 20, 16)
    at = torch.arange(20)
    expected = scaled_dot_product_attention(q, q, q, attn_mask=(at[:, None] >= at) & ((at < 3) | (at > 5)))
    for mask in ("k < 3 or k > 5", lambda b, h, q, k: (k < 3) | (k > 5)):
        close(Attention(is_causal=True, mask=mask)(q, q, q), expected)
    with pytest.raises(DiagnosticError, match=r"unexpected `\)`"):
        Attention(is_causal=True, mask="true) or (true")


def test_several_threads_at_once() -> None:
    q = randn(1, 2, 40, 16)
    expected = attention(q, q, q, is_causal=True)
    results: list[torch.Tensor] = []

    def work() -> None:
        results.extend(attention(q, q, q, is_causal=True) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(torch.equal(r, expected) for r in results)


def test_a_small_gpt_gives_the_logits_of_torch() -> None:
    theirs, ours = pair(Attention(mask="causal", layout="bshd"), "cpu", torch.float32)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=BACKEND)
    for length in (7, 33):
        tokens = torch.arange(2 * length).view(2, length) % 256
        expected = theirs(tokens)
        close(ours(tokens), expected, 1e-5)
        close(compiled(tokens), expected, 1e-5)


def test_compiled_specs_are_callables_of_tensors() -> None:
    """Through the operator, so that torch.compile follows them; and with every check of the other way."""
    spec = attngen.define(
        dtype="fp16", head_dim=16, mask="causal and q - k < n", score="alibi(slopes)",
        inputs={"slopes": ("fp32", ("q_heads",))}, params={"n": ("int", 9)},
    )  # fmt: skip
    slopes = torch.tensor([0.5, 0.25])
    kernel = attngen.compile(spec, kernel="tiled", device="emulated", captures={"slopes": slopes})
    q = randn(1, 2, 40, 16)
    found = kernel(q, q, q, n=5)
    other_way = kernel(q, q, q, n=5, out=torch.empty_like(q))
    assert torch.equal(found, other_way)
    traced = torch.compile(lambda q: kernel(q, q, q, n=5), fullgraph=True, backend=BACKEND)
    assert torch.equal(traced(q), found)
    assert not torch.equal(kernel(q, q, q, slopes=2 * slopes), kernel(q, q, q))
    for call, message in (
        (lambda: kernel(q, q, q, m=5), "no input or param `m`"),
        (lambda: kernel(q, q, q, n=0.5), "expected an int"),
        (lambda: kernel(q, q.numpy(), q), "`k` is a ndarray"),
        (lambda: kernel(q, q, q, slopes=[1, 2]), "`slopes` is a list"),
        (lambda: kernel(q.to("meta"), q, q), "meta"),
        (lambda: kernel(q.clone().requires_grad_(), q, q), "requires grad"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


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


@pytest.mark.long
def test_a_described_layer_is_itself_in_another_process() -> None:
    """Descriptions are known by number, and the numbers of two processes differ."""
    layer = Attention(mask="causal and q - k < 3")
    text = f"""
import pickle, sys, torch
from attngen.torch import Attention
Attention(mask="true")
layer = pickle.loads(bytes.fromhex("{pickle.dumps(layer).hex()}"))
q = torch.arange(320, dtype=torch.float32).view(1, 1, 20, 16) / 320
sys.stdout.write(bytes(layer(q, q, q).numpy().tobytes()).hex())
"""
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    q = torch.arange(320, dtype=torch.float32).view(1, 1, 20, 16) / 320
    assert found == layer(q, q, q).numpy().tobytes().hex()


def test_the_operator_takes_one_attention() -> None:
    q = randn(1, 1, 8, 16)
    two = "attention one { dtype fp16 head_dim 16 } attention two { dtype fp16 head_dim 16 }"
    with pytest.raises(ArgumentError, match="one attention, not 2"):
        attention_operator(q, q, q, two)
    with pytest.raises(ArgumentError, match="1 ints were given"):
        attention_operator(q, q, q, "attention a { dtype fp16 head_dim 16 }", [], [3])
