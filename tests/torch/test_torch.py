"""The operator attngen::attention on the CPU, by the emulated device: results, traces, threads, repeated calls."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen.torch  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.torch import Attention, attention, observed, operator  # noqa: E402
from attngen.torch.description import constant, fixed_text  # noqa: E402
from attngen.torch.operator import attention_operator  # noqa: E402
from tests import tiers  # noqa: E402
from tests.torch.tensors import BACKEND, close, randn  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("mode", tiers.cases(["auto", "naive", "tiled", "fused"], quick=["auto"]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_agrees_with_torch(mode: str, dtype) -> None:
    q, k, v = randn(2, 4, 33, 16, dtype=dtype), randn(2, 2, 40, 16, dtype=dtype), randn(2, 2, 40, 24, dtype=dtype)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    close(attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True, mode=mode), expected, tolerance)


def test_head_sizes_that_are_no_multiple_of_8_are_padded() -> None:
    """By torch's function, by a layer, and in a cache; forward and backward, with the scale of the size that tensors have."""
    q, k, v = (randn(1, 2, 18, size, dtype=torch.float32).requires_grad_() for size in (13, 13, 7))
    layer = Attention(mask="q >= k", layout="bshd", mode="naive")
    calls = {
        "a function": lambda: attention(q, k, v, is_causal=True, mode="naive"),
        "with lse": lambda: attention(q, k, v, is_causal=True, mode="naive", return_lse=True)[0],
        "a layer": lambda: layer(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2),
        "math": lambda: attention(q, k, v, is_causal=True, mode="math"),
    }
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = randn(*expected.shape, dtype=torch.float32)
    gradients = torch.autograd.grad(expected, (q, k, v), gradient)
    for call in calls.values():
        o = call()
        close(o.detach(), expected.detach(), 1e-5)
        for found, right in zip(torch.autograd.grad(o, (q, k, v), gradient), gradients, strict=True):
            close(found, right, 1e-5)
    with torch.no_grad():
        cached = layer.decode(*(t.transpose(1, 2) for t in (q[:, :, 9:10], k, v)), cache_seqlens=10).transpose(1, 2)
    close(cached, expected[:, :, 9:10].detach(), 1e-5)


def test_what_a_head_size_has_not_is_not_rotated() -> None:
    tables = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", 8)))
    layer = Attention(rotary="16 halves by cosines, sines", inputs=tables)
    with pytest.raises(ArgumentError, match="rotates 16 elements; expected at most the head size, 13"):
        layer(*[randn(1, 1, 4, 13)] * 3, cosines=randn(4, 8), sines=randn(4, 8))


def test_the_emulated_device_says_once_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.device import select
    from attngen.torch import runtime

    q = randn(1, 1, 8, 16)
    spec = attngen.define(head_dim=16)

    def warnings_of(*calls) -> list[warnings.WarningMessage]:
        monkeypatch.setattr(select._Said, "emulated", False)
        monkeypatch.setattr(select, "has_gpu", lambda: False)
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


def test_compiled_specs_are_callables_of_tensors() -> None:
    """Calls with tensors use the operator, so that torch.compile traces them, and have the checks of calls with arrays."""
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
        (lambda: kernel(q.clone().requires_grad_(), q, q, out=torch.empty_like(q)), "records no gradient"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_results_do_not_depend_on_the_default_type(dtype) -> None:
    """Nor on the mode of torch in which a kernel ran first."""
    q = randn(1, 2, 6, 24, dtype=torch.float32)
    text = f"attention of_{str(dtype)[6:]} {{ dtype fp32 head_dim 24 kernel naive }}"

    def results() -> list[torch.Tensor]:
        asked = attngen.torch.AuxRequest(max_scores=True)
        options = {"mode": "naive"}
        _, of_rows = attngen.torch.flex_attention(
            q, q, q, lambda s, b, h, i, j: s + 0.1 * j, return_aux=asked, kernel_options=options
        )
        output, lse = attention(q, q, q, mode="math", return_lse=True)
        merged = attngen.torch.merge(output, lse, output, lse)
        dropped = attention(q, q, q, dropout_p=0.3, seed=1, mode="math")
        return [of_rows.max_scores, output, lse, *merged, dropped, *attention_operator(q, q, q, text)]

    torch.set_default_dtype(dtype)
    try:
        with torch.inference_mode():
            results()
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, expected in zip(found, results(), strict=True):
        assert one.dtype == expected.dtype == torch.float32
        assert torch.equal(one, expected)
        assert not one.is_inference()


def test_compiled_specs_are_copied() -> None:
    """As parts of a model that is copied, saved, or sent to another process, after their kernels were loaded too."""
    spec = attngen.define(
        dtype="fp16", head_dim=16, mask="causal", score="alibi(slopes)", inputs={"slopes": ("fp32", ("q_heads",))}
    )
    slopes = torch.tensor([0.5, 0.25])
    kernel = attngen.compile(spec, kernel="naive", device="emulated", captures={"slopes": slopes})
    q = randn(1, 2, 20, 16)
    expected = kernel(q, q, q)
    for arrays in ((q, q, q), [q.numpy()] * 3):
        kernel(*arrays)  # loads the kernel
        copies = copy.deepcopy({"kernel": kernel, "slopes": slopes}), pickle.loads(pickle.dumps({"kernel": kernel}))
        for copied in copies:
            assert torch.equal(copied["kernel"](q, q, q), expected)
            copied["kernel"].captures["slopes"].zero_()
            assert not torch.equal(copied["kernel"](q, q, q), expected)
            assert torch.equal(kernel(q, q, q), expected)
        assert copies[0]["slopes"] is copies[0]["kernel"].captures["slopes"]
        assert torch.equal(copy.copy(kernel)(q, q, q), expected)
    assert copy.copy(kernel).captures["slopes"] is slopes
    with pytest.raises(TypeError, match="compile it for the name of a device"):
        pickle.dumps(attngen.compile(spec, kernel="naive", device=kernel.device))


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


def test_parameters_do_not_keep_a_call_from_being_repeated() -> None:
    assert observed.are_plain((torch.nn.Parameter(randn(2)), randn(2)))
    assert not observed.are_plain((torch._neg_view(randn(2)),))


@pytest.mark.long
def test_an_import_does_not_load_the_compiler_of_torch() -> None:
    """torch._dynamo and sympy take longer than everything else that attngen.torch loads."""
    code = "import sys, torch{}; print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    runs = [
        subprocess.run([sys.executable, "-c", code.format(more)], check=True, capture_output=True)
        for more in ("", ", attngen.torch")
    ]
    assert runs[0].stdout == runs[1].stdout


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    marks = torch.compiler.assume_constant_result(theirs).__dict__
    assert marks
    assert marks.items() <= constant(ours).__dict__.items()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cu128"))
    with pytest.raises(ImportError, match=r"requires torch 2.10 or later; this is torch 2.9.1\+cu128"):
        importlib.reload(attngen.torch)
