"""`Attention`, the layer: specs and descriptions, captured tensors, and its place in torch's models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen.torch  # noqa: E402
from attngen import ArgumentError, DiagnosticError  # noqa: E402
from attngen.torch import Attention, attention  # noqa: E402
from tests.torch.gpt import pair  # noqa: E402
from tests.torch.tensors import BACKEND, close, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    without = attngen.define(dtype="fp16", head_dim=64, mask="causal")
    assert torch.equal(Attention(without, mode="tiled", return_lse=True)(q, q, q)[1], lse)
    with pytest.raises(attngen.DiagnosticError, match="lse"):
        Attention(attngen.define(normalize="sigmoid"), return_lse=True)
    with pytest.raises(ArgumentError, match="elements of fp32"):
        layer(q.float(), q.float(), q.float())


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


def test_numpy_captures_become_buffers() -> None:
    table = np.linspace(0, 1, 64, dtype=np.float32)
    layer = Attention(score=lambda s, b, h, q, k: s + table[k])
    q = randn(1, 1, 20, 16)
    bias = torch.as_tensor(table)[:20].expand(20, 20)
    close(layer(q, q, q), scaled_dot_product_attention(q.float(), q.float(), q.float(), attn_mask=bias))
    assert layer.table.dtype == torch.float32


def test_numpy_captures_that_torch_cannot_share() -> None:
    table = np.linspace(0, 1, 64, dtype=np.float32)[::-1]
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    layer = Attention(score=lambda s, b, h, q, k: s + table[k] * fixed[0])
    q = randn(1, 1, 20, 16)
    bias = torch.from_numpy(table[:20].copy()).expand(20, 20)
    close(layer(q, q, q), scaled_dot_product_attention(q, q, q, attn_mask=bias.half()))


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
    (of_slopes,) = torch.autograd.grad(layer(q, q, q).sum(), layer.slopes)
    assert of_slopes.shape == layer.slopes.shape
    half = temperature
    with pytest.raises(ArgumentError, match="captured array `half` has the name of an attribute"):
        Attention(score=lambda s, b, h, q, k: s * half)


class Biased(torch.nn.Module):
    """A layer whose functions read a parameter, a buffer of a module in it, and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.tables, self.window = torch.nn.Parameter(torch.tensor([0.5, 0.25])), torch.nn.Module(), 7
        self.tables.register_buffer("distances", torch.arange(20) / 10)
        self.attention = Attention(
            score=lambda s, b, h, q, k: s + self.slopes[h] * self.tables.distances[k],
            mask=lambda b, h, q, k: q - k < self.window,
            mode="naive",
        )


def test_functions_read_tensors_of_the_module_that_they_belong_to() -> None:
    module, q, at = Biased(), randn(1, 2, 20, 16), torch.arange(20)
    for layer in (module.attention, copy.deepcopy(module).attention):
        bias = layer.slopes[:, None, None] * layer.distances
        expected = scaled_dot_product_attention(q, q, q, attn_mask=bias.masked_fill(at[:, None] - at >= 7, -torch.inf).half())
        close(layer(q, q, q), expected)
    assert module.attention.slopes is module.slopes
    assert module.attention.distances is module.tables.distances
    (of_slopes,) = torch.autograd.grad(module.attention(q, q, q).square().sum(), module.slopes)
    assert of_slopes.abs().min() > 0


def test_functions_keep_the_meaning_that_they_had_when_the_layer_was_made() -> None:
    """For every element type, in training and evaluation, and in a copy: none of them traces the functions again."""
    width, bias = 7, torch.zeros(20)
    layer = Attention(score=lambda s, b, h, q, k: s + bias[k], mask=lambda b, h, q, k: q - k < width, dropout=0.5, mode="math")
    width, bias = 3, torch.ones(10)
    at = torch.arange(20)
    for one in (layer.eval(), copy.deepcopy(layer)):
        for dtype in (torch.float16, torch.float32):
            q = randn(1, 2, 20, 16).to(dtype)
            close(one(q, q, q), scaled_dot_product_attention(q, q, q, attn_mask=at[:, None] - at < 7))


def test_is_causal_beside_a_mask_is_both_of_them() -> None:
    q = randn(1, 1, 20, 16)
    at = torch.arange(20)
    expected = scaled_dot_product_attention(q, q, q, attn_mask=(at[:, None] >= at) & ((at < 3) | (at > 5)))
    for mask in ("k < 3 or k > 5", lambda b, h, q, k: (k < 3) | (k > 5)):
        close(Attention(is_causal=True, mask=mask)(q, q, q), expected)
    with pytest.raises(DiagnosticError, match=r"unexpected `\)`"):
        Attention(is_causal=True, mask="true) or (true")


def test_an_input_may_be_called_as_an_argument_of_torch() -> None:
    layer = Attention(mask="attn_mask[q, k]", inputs={"attn_mask": ("bool", ("q_len", "kv_len"))}, mode="naive")
    q, mask = randn(1, 2, 6, 16), torch.ones(6, 6, dtype=torch.bool).tril()
    close(layer(q, q, q, attn_mask=mask), scaled_dot_product_attention(q, q, q, is_causal=True))
    assert torch.equal(layer(q, q, q, mask), layer(q, q, q, attn_mask=mask))


def test_a_layer_takes_a_seed_in_evaluation_too() -> None:
    q = randn(1, 2, 6, 16)
    for layer in (
        Attention(mask="causal", dropout=0.5, mode="naive"),
        Attention(attngen.define(dtype="fp16", head_dim=16, mask="causal", dropout=0.5), mode="naive"),
    ):
        dropped = layer(q, q, q, seed=1, offset=2)
        assert torch.equal(layer(q, q, q, seed=1, offset=2), dropped)
        layer.eval()
        close(layer(q, q, q, seed=1, offset=2), scaled_dot_product_attention(q, q, q, is_causal=True))
    with pytest.raises(ArgumentError, match="no input or param `seed`"):
        Attention(mask="causal")(q, q, q, seed=1)


def test_a_parameter_that_was_taken_away_is_named() -> None:
    slopes = torch.nn.Parameter(torch.ones(2))
    layer = Attention(score=lambda s, b, h, q, k: s + slopes[h] * k)
    layer.slopes = None
    with pytest.raises(ArgumentError, match="`slopes` is a NoneType"):
        layer(*[randn(1, 2, 6, 16)] * 3)


def test_captured_tensors_of_a_type_that_no_kernel_reads_are_named() -> None:
    bias = torch.ones(2)
    settings = {"score": lambda s, b, h, q, k: s + bias[h]}
    q = randn(1, 2, 6, 16).double()
    Attention(**settings, mode="math").double()(q, q, q)
    for dtype in (torch.float64, torch.float8_e4m3fn):
        layer = Attention(**settings, mode="naive").to(dtype)
        with pytest.raises(TypeError, match=f"`bias` has elements of {str(dtype)[6:]}; expected one of fp32"):
            layer(*[q.float()] * 3)


def test_tensors_without_a_shape_are_not_captured() -> None:
    for table in (torch.nested.nested_tensor([torch.zeros(6), torch.zeros(5)]), torch.nn.UninitializedParameter()):
        with pytest.raises(attngen.TraceError, match="without a shape cannot be captured"):
            Attention(score=lambda s, b, h, q, k, table=table: s + table[q, k])


def test_what_a_layer_captured_is_freed_with_it() -> None:
    def captured() -> Any:
        slopes = torch.nn.Parameter(torch.ones(2))
        layer = Attention(score=lambda s, b, h, q, k: s + slopes[h] * k, mode="naive")
        copy.deepcopy(layer)(*[randn(1, 2, 6, 16).requires_grad_()] * 3).sum().backward()
        return weakref.ref(slopes)

    slopes = captured()
    gc.collect()
    assert slopes() is None


def test_blocks_of_a_model_that_are_compiled_one_by_one_share_their_code() -> None:
    """torch.compile refuses more than 8 compilations of one function."""

    class Block(torch.nn.Module):
        def __init__(self, window: int) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.ones(2) / window)
            self.attend = Attention(mask="causal and q - k < n", score=self.score, params={"n": ("int", window)}, mode="naive")

        def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.slopes[h] * (k - q)

        def forward(self, q: torch.Tensor) -> Any:
            return self.attend(q, q, q)

    compiled = CompileCounter()
    q = randn(1, 2, 10, 16)
    for window in (3, 3, 3, 9):
        block = Block(window)
        expected = block(q)
        assert torch.equal(torch.compile(block, fullgraph=True, backend=compiled)(q), expected)
        del block  # the next one shares what it left
    assert compiled.frame_count == 2


def test_a_layer_of_functions_without_a_global_name_is_pickled() -> None:
    slopes, scale = torch.nn.Parameter(torch.tensor([0.5, 0.25])), 0.5
    layer = Attention(mask=lambda b, h, q, k: q >= k, score=lambda s, b, h, q, k: s * scale + slopes[h] * (k - q), mode="naive")
    q = randn(1, 2, 6, 16)
    expected, scale = layer(q, q, q), 2.0
    copied = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copied(q, q, q), expected)
    assert [name for name, _ in copied.named_parameters()] == ["slopes"]


@pytest.mark.long
def test_a_described_layer_is_itself_in_another_process() -> None:
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


@pytest.mark.long
def test_a_small_gpt_gives_the_logits_of_torch() -> None:
    theirs, ours = pair(Attention(mask="causal", layout="bshd"), "cpu", torch.float32)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=BACKEND)
    for length in (7, 33):
        tokens = torch.arange(2 * length).view(2, length) % 256
        expected = theirs(tokens)
        close(ours(tokens), expected, 1e-5)
        close(compiled(tokens), expected, 1e-5)


def test_an_operator_in_a_graph_takes_one_line() -> None:
    """Inductor writes the nodes of a graph into comments, as text; one with a line break would end its comment."""
    nodes: list[str] = []

    def note(graph: torch.fx.GraphModule, _: object) -> object:
        nodes.extend(str(node.format_node()) for node in graph.graph.nodes if "attngen" in str(node.target))
        return graph.forward

    q = randn(1, 2, 20, 64)
    spec = attngen.define(dtype="fp16", head_dim=64, mask="causal")
    layers = (attention, Attention(mask="causal"), Attention(spec), attngen.compile(spec, device="emulated"))
    for layer in layers:
        torch.compile(lambda q, layer=layer: layer(q, q, q), backend=note)(q)
    assert len(nodes) == len(layers)
    assert not any("\n" in node for node in nodes), nodes


@pytest.mark.parametrize("described", [{}, {"mask": "causal"}, {"score": "s + attn_mask[q, k]"}])
def test_a_symbolic_trace_says_what_it_lacks(described: dict[str, Any]) -> None:
    if "score" in described:
        described = {**described, "inputs": {"attn_mask": ("fp32", ("q_len", "kv_len"))}}
    with pytest.raises(ArgumentError, match=r"`q` is a Proxy of torch\.fx\.symbolic_trace.*torch\.export"):
        torch.fx.symbolic_trace(Attention(**described))


def test_a_number_that_changes_is_compiled_for_once_as_a_tensor() -> None:
    """As docs/python.md says: torch.full would make a graph for each number."""
    counter = CompileCounterWithBackend("aot_eager")
    layer = Attention(score="s * heat", inputs={"heat": ("fp32", ())}, mode="naive")
    heated = torch.compile(
        lambda q, number: layer(q, q, q, heat=torch.ones((), device=q.device).mul(number)), backend=counter, fullgraph=True
    )
    q = randn(1, 1, 8, 16)
    for number in (0.5, 0.7, 0.9, 1.1):
        close(heated(q, number), scaled_dot_product_attention(q, q, q, scale=number / 4))
    assert counter.frame_count == 2
