"""`activate`: torch's own layers, and whatever calls scaled_dot_product_attention, with attngen's kernels."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from attngen import ArgumentError  # noqa: E402
from attngen.torch import NotReplacedWarning, activate, activated, attention, restore  # noqa: E402
from tests.torch.tensors import BACKEND, close, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
TORCHS = functional.scaled_dot_product_attention


def test_calls_are_attngens_until_restored() -> None:
    q, k = randn(1, 4, 20, 16), randn(1, 2, 30, 16)
    ours = attention(q, k, k, is_causal=True, enable_gqa=True)
    theirs = functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    assert not torch.equal(ours, theirs)  # they add up in other orders
    activate(emulated=True)
    try:
        assert torch.equal(functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), ours)
        activate()  # the GPU alone: tensors on the CPU are torch's, as before
        assert torch.equal(functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), theirs)
        with activated(emulated=True):
            assert torch.equal(functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), ours)
        assert torch.equal(functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), theirs)
    finally:
        restore()
    assert functional.scaled_dot_product_attention is TORCHS
    restore()  # nothing to undo
    with pytest.raises(ZeroDivisionError), activated():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is TORCHS


def test_what_somebody_else_put_over_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *_: None)
    with pytest.raises(RuntimeError, match="another library"):
        restore()


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_transformer_layer_trains(masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = randn(2, 20, 32, dtype=torch.float32)
    mask = nn.Transformer.generate_square_subsequent_mask(20) if masked else None

    def results() -> list[torch.Tensor]:
        layer.zero_grad()
        y = layer(x, src_mask=mask, is_causal=False)
        y.square().sum().backward()
        return [y.detach(), *(p.grad for p in layer.parameters())]

    theirs = results()
    with activated(emulated=True):
        ours = results()
    assert not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_torchs_fast_path_does_not_call_the_function() -> None:
    """Which is why the documents say how to disable it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = randn(2, 20, 32, dtype=torch.float32)
    try:
        for is_enabled in (True, False):
            torch.backends.mha.set_fastpath_enabled(is_enabled)
            with torch.no_grad(), activated(emulated=True):
                ours = layer(x)
                with activated():
                    theirs = layer(x)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert torch.equal(ours, theirs) == is_enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("columns", [False, True])  # whether a tensor's last dimension is not contiguous
def test_compiled_graphs_have_the_operator(columns: bool) -> None:
    targets: list[str] = []

    def note(graph: torch.fx.GraphModule, _: object) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    q = randn(1, 2, 16, 20).mT if columns else randn(1, 2, 20, 16)
    expected = TORCHS(q, q, q, is_causal=True)
    with activated(emulated=True):
        call = torch.compile(
            lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True), backend=note, fullgraph=True
        )
        close(call(q), expected)
    assert any("attngen" in target for target in targets), targets


def test_sizes_may_be_symbols_of_torch_compile() -> None:
    with activated(emulated=True):
        call = torch.compile(
            lambda q, k: functional.scaled_dot_product_attention(q, k, k), backend=BACKEND, fullgraph=True, dynamic=True
        )
        for batch, heads, length in ((2, 4, 5), (3, 4, 6), (5, 2, 9)):
            q, k = randn(batch, heads, length, 16), randn(batch, heads, length + 3, 16)
            close(call(q, k), TORCHS(q, k, k))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dropout_p": 1.0}, "nothing is kept"),
        ({"dtype": torch.float64}, "float64"),
        ({"size": 584}, "head size is 584"),
        ({"shape": (1, 2, 2, 20)}, "5 dimensions"),
    ],
)
def test_what_attngen_cannot_do_is_torchs_and_says_why(arguments: dict, reason: str) -> None:
    shape = arguments.pop("shape", (1, 2, 20))
    q = randn(*shape, arguments.pop("size", 16), dtype=arguments.pop("dtype", torch.float32))
    torch.manual_seed(0)
    expected = TORCHS(q, q, q, **arguments)
    torch.manual_seed(0)
    with activated(emulated=True), pytest.warns(NotReplacedWarning, match=reason):
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q, **arguments), expected)


@pytest.mark.parametrize("kv_len", [6, 9])
def test_a_bias_of_torch_is_what_it_means(kv_len: int) -> None:
    """Its elements are memory that nobody has written."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k = randn(1, 2, 6, 16), randn(1, 2, kv_len, 16)
    at = torch.arange(6)[:, None], torch.arange(kv_len)
    for make, mask in ((causal_upper_left, at[0] >= at[1]), (causal_lower_right, at[0] + kv_len - 6 >= at[1])):
        bias, expected = make(6, kv_len), TORCHS(q, k, k, mask)
        close(attention(q, k, k, bias), expected)
        for emulated in (True, False):  # by attngen, and by torch
            with activated(emulated=emulated):
                close(functional.scaled_dot_product_attention(q, k, k, bias), expected)
        with pytest.raises(ArgumentError, match="causal by itself"):
            attention(q, k, k, bias, is_causal=True)


def test_what_torch_broadcasts_is_torchs() -> None:
    q, k, v = randn(2, 4, 5, 16), randn(2, 2, 7, 16), randn(2, 4, 7, 16)
    calls = {
        "batch of q": ((q[:1], v, v), {}),
        "heads of q": ((q[:, :1], v, v), {}),
        "heads of k and v": ((q, v[:, :1], v[:, :1]), {}),
        "heads of k and v without batch": ((q[0], v[0, :1], v[0, :1]), {}),
        "k and v share other heads": ((q, k, v), {"enable_gqa": True}),
        "no batch": ((q, v[0], v[0]), {}),
    }
    for name, (tensors, more) in calls.items():
        with activated(emulated=True), pytest.warns(NotReplacedWarning, match="broadcast"):
            found = functional.scaled_dot_product_attention(*tensors, **more)
        assert torch.equal(found, TORCHS(*tensors, **more)), name
    for tensors in ((q, k, k), (q, k[:1], k[:1]), (q[0], k[0], k[0])):  # by a kernel
        with activated(emulated=True), warnings.catch_warnings():
            warnings.simplefilter("error", NotReplacedWarning)
            found = functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
        close(found, TORCHS(*tensors, enable_gqa=True))
    for tensors, more in (((q, k, k), {}), ((q, v[:, :3], v[:, :3]), {"enable_gqa": True}), ((q, v[:, :, :0], v), {})):
        with activated(emulated=True), pytest.raises(ArgumentError):
            functional.scaled_dot_product_attention(*tensors, **more)


def test_a_mask_beside_is_causal_is_both() -> None:
    q, mask = randn(1, 2, 20, 16), torch.rand(20, 20) < 0.7
    mask[:, 0] = True
    expected = TORCHS(q, q, q, mask & torch.ones(20, 20, dtype=torch.bool).tril())
    with activated(emulated=True):
        close(functional.scaled_dot_product_attention(q, q, q, mask, is_causal=True), expected)


def test_mistakes_are_named() -> None:
    q = randn(1, 2, 20, 16)
    with activated(emulated=True):
        with pytest.raises(ArgumentError, match="`v` is"):
            functional.scaled_dot_product_attention(q, q, q[:, :, :7])
        with pytest.raises(ArgumentError, match="`k` is a NoneType"):
            functional.scaled_dot_product_attention(q, None, q)


def test_a_symbolic_trace_calls_what_is_active_when_it_runs() -> None:
    class Model(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = randn(1, 2, 20, 16)
    with activated(emulated=True):
        traced = torch.fx.symbolic_trace(Model())
        assert torch.equal(traced(q), attention(q, q, q, is_causal=True))
    assert torch.equal(traced(q), TORCHS(q, q, q, is_causal=True))


def test_views_that_no_kernel_reads_in_place_are_copied() -> None:
    q = randn(1, 2, 16, 20).transpose(2, 3)  # its last dimension is not contiguous
    expected = TORCHS(q, q, q)
    with activated(emulated=True), warnings.catch_warnings():
        warnings.simplefilter("error", NotReplacedWarning)
        close(functional.scaled_dot_product_attention(q, q, q), expected)
