"""attngen.torch on the GPU: modes of torch, streams, threads, devices, memory."""

from __future__ import annotations

import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen.torch  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.plan import ARCHES  # noqa: E402
from attngen.schedules import plans_for, schedules_for  # noqa: E402
from attngen.spec.attention import KernelRequest  # noqa: E402
from attngen.torch import Attention, attention, operator, runtime  # noqa: E402
from attngen.torch.description import fixed_text  # noqa: E402
from tests.harness import SHIPPED, shipped  # noqa: E402
from tests.torch.gpt import pair  # noqa: E402

LENGTHS = (16, 33, 64, 100, 128, 250, 333, 512, 777, 1024)


def randn(*shape: int, dtype=None) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype or torch.bfloat16)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def test_opcheck() -> None:
    spec = attngen.define(
        dtype="bf16", head_dim=64, mask="q >= k and q - k < n", score="s * c + bias[h]", lse=True,
        inputs={"bias": ("fp32", ("heads",))}, params={"n": ("int", 50), "c": ("float", 0.5)},
    )  # fmt: skip
    q, k, bias = randn(2, 4, 200, 64), randn(2, 2, 240, 64), torch.randn(4, device="cuda")
    for queries in (q, randn(2, 200, 4, 64).transpose(1, 2)):
        arguments = (queries, k, k, fixed_text(spec, "auto"), [bias], [50], [0.5])
        result = torch.library.opcheck(operator.attention_operator, arguments)
        assert set(result.values()) == {"SUCCESS"}


@pytest.fixture(scope="module")
def models():
    return pair(Attention(mask="causal", layout="bshd"), "cuda", torch.bfloat16, width=512, heads=8, layers=4)


def logits_error(models, run, length: int) -> None:
    """Against float64: at most twice the error of the model with torch's attention, plus one bf16 step of the largest logit."""
    theirs, _ = models
    tokens = torch.randint(256, (2, length), device="cuda")
    exact = pair(theirs.blocks[0].attend, "cuda", torch.float64, width=512, heads=8, layers=4)[0]
    exact.load_state_dict({n: p.double() for n, p in theirs.state_dict().items()})
    expected = exact(tokens)
    allowed = 2 * error(theirs(tokens), expected) + float(expected.abs().max()) * 2**-7
    assert error(run(tokens), expected) <= allowed, length


def test_a_gpt_in_eager_mode(models) -> None:
    before = len(runtime.runtimes)
    for length in LENGTHS:
        logits_error(models, models[1], length)
    assert len(runtime.runtimes) - before <= 1


def test_a_gpt_compiled_without_a_break(models) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(models[1], fullgraph=True, dynamic=True)
    before = len(runtime.runtimes)
    for length in LENGTHS:
        logits_error(models, compiled, length)
    assert len(runtime.runtimes) - before <= 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_gpt_replayed_from_cuda_graphs(models) -> None:
    before = len(runtime.runtimes)
    for length in LENGTHS:
        tokens = torch.randint(256, (2, length), device="cuda")
        models[1](tokens)  # the first call of a length checks and compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = models[1](tokens)

        def replay(given: torch.Tensor, tokens=tokens, graph=graph, logits=logits) -> torch.Tensor:
            tokens.copy_(given)
            graph.replay()
            return logits

        logits_error(models, replay, length)
    assert len(runtime.runtimes) - before <= 1


def test_two_streams_at_once() -> None:
    problems = [randn(3, 2, 8, 700, 64).unbind(0) for _ in range(2)]
    expected = [attention(*p, is_causal=True) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(attention(*problems[i], is_causal=True))
    torch.cuda.synchronize()
    for found, right in zip(results, expected, strict=True):
        assert all(torch.equal(f, right) for f in found)


def test_several_threads_at_once() -> None:
    q, k, v = randn(3, 2, 8, 300, 64).unbind(0)
    expected = {n: attention(q[:, :, :n], k, v) for n in (100, 200, 300)}
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(60):
                n = (100, 200, 300)[i % 3]
                found = attention(q[:, :, :n], k, v)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(found, expected[n]):
                    wrong.append(n)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_that_has_not_used_the_gpu_calls_a_compiled_kernel() -> None:
    """The driver packs tensor maps in a context, which such a thread does not have yet."""
    q, k, v = randn(3, 2, 8, 300, 64).unbind(0)
    spec = attngen.define(dtype="bf16", head_dim=64)
    expected = attngen.compile(spec, device="cuda")(q, k, v)
    torch.cuda.synchronize()
    again = attngen.compile(spec, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(again, q, k, v).result(), expected)


def test_calls_wait_for_nothing() -> None:
    """A call returns while the GPU is still busy with what stands before it."""
    q = randn(1, 2, 64, 64)
    attention(q, q, q)
    torch.cuda.synchronize()
    busy, done = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    busy.record()
    attention(q, q, q)
    done.record()
    assert not busy.query()
    torch.cuda.synchronize()
    assert done.query()


@pytest.mark.parametrize(("dtype", "mode"), [(torch.bfloat16, "auto"), (torch.float32, "fused"), (torch.float32, "hopper")])
def test_kernels_allocate_their_outputs_alone_but_for_the_terms_of_fp32(dtype: torch.dtype, mode: str) -> None:
    """At 32768 keys: O and lse, each rounded up to the allocator's 512 bytes, and nothing more; `hopper` in fp32 also three
    terms of 2 bytes for each number of Q, K and V. The first call on a stream of a kernel whose blocks take their work from a
    counter allocates that too, once."""
    q = randn(1, 8, 32768, 64, dtype=dtype)
    attention(q, q, q, is_causal=True, return_lse=True, mode=mode)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, lse = attention(q, q, q, is_causal=True, return_lse=True, mode=mode)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    terms = 3 * 3 * 2 * q.numel() if (dtype, mode) == (torch.float32, "hopper") else 0
    assert peak == output.nbytes + lse.nbytes + terms, peak


def test_other_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q = randn(1, 2, 64, 64).to("cuda:1")
    assert torch.cuda.current_device() == 0
    found = attention(q, q, q)
    assert found.device == q.device
    assert error(found, scaled_dot_product_attention(q.double(), q.double(), q.double())) < 2e-2
    with pytest.raises(ArgumentError, match="cuda:1"):
        attention(q.to("cuda:0"), q, q)
    near = q.to("cuda:0")
    attention(near, near, near)
    with pytest.raises(ArgumentError, match="cuda:1"):
        attention(q, near, near)


def test_mistakes_after_a_signature_was_seen_are_still_named() -> None:
    memory = randn(2 * 64 * 64 + 8)
    q = memory[: 2 * 64 * 64].view(1, 2, 64, 64)
    attention(q, q, q)
    with pytest.raises(ArgumentError, match="starts at an address"):
        attention(memory[1 : 2 * 64 * 64 + 1].view(1, 2, 64, 64), q, q)
    assert attention(q.clone().requires_grad_(), q, q).requires_grad


def test_calls_from_memory_are_what_the_operator_gives() -> None:
    """Whatever torch must see or change on the way goes through its dispatcher, and nothing remembered hides a mistake."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(f"function {func}")
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(f"dispatch {func}")
            return func(*args, **(kwargs or {}))

    layer = Attention(
        mask="causal", score="s + weight * bias[h]", inputs={"bias": ("fp32", ("q_heads",))}, params={"weight": ("float", 1.0)}
    )
    q = randn(1, 2, 70, 64, dtype=torch.float32)
    bias = torch.tensor([1.0, -2.0], device="cuda")
    calls = {
        "attention": lambda q: attention(q, q, q, is_causal=True),
        "layer": lambda q: layer(q, q, q, bias=bias),
        "param": lambda q: layer(q, q, q, bias=bias, weight=0.5),
    }
    for name, call in calls.items():
        expected = call(q)
        assert torch.equal(call(q), expected), name
        for mode in (Functions, Dispatched):
            seen.clear()
            with mode():
                assert torch.equal(call(q), expected), name
            assert any("attngen.attention" in s for s in seen), (name, mode)
        with torch.profiler.profile() as profile:
            call(q)
        assert any("attngen::attention" in e.key for e in profile.key_averages()), name
        learned = call(q.clone().requires_grad_())
        assert learned.requires_grad, name
        torch.testing.assert_close(learned.detach(), expected)
    assert not torch.equal(calls["param"](q), calls["layer"](q))
    learned = bias.clone().requires_grad_()
    with torch.no_grad():
        assert not layer(q, q, q, bias=learned).requires_grad
    assert layer(q, q, q, bias=learned).requires_grad
    for wrong in (True, "1", [1.0]):
        with pytest.raises(ArgumentError, match="param `weight`"):
            layer(q, q, q, bias=bias, weight=wrong)
    copied = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copied(q, q, q, bias=bias), calls["layer"](q))
    lazy = torch._neg_view(q)
    assert torch.equal(attention(q, q, lazy), -attention(q, q, q))


def test_outputs_given_are_written_and_checked() -> None:
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal", lse=True)
    kernel = attngen.compile(spec, device="cuda")
    q, k, v = randn(3, 2, 4, 130, 64).unbind(0)
    expected, sums = kernel(q, k, v)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(2):  # checked, then from memory
        out, lse = torch.empty_like(q), torch.empty_like(sums)
        rows = torch.empty(2, 130, 4, 64, device="cuda", dtype=q.dtype).transpose(1, 2)
        given = kernel(q, k, v, out=out, lse=lse)
        assert given[0] is out
        assert given[1] is lse
        assert torch.equal(out, expected)
        assert torch.equal(lse, sums)
        assert torch.equal(kernel(q, k, v, out=rows)[0], expected)
        packed = torch.stack((k, v, v), dim=3)  # interleaved, and apart
        assert torch.equal(kernel(q, packed[:, :, :, 0], packed[:, :, :, 1], out=packed[:, :, :, 2])[0], expected)
        other = kernel(q, k, v, stream=stream.cuda_stream)[0]
        torch.cuda.synchronize()
        assert torch.equal(other, expected)
        for wrong, message in (
            (v, "`out` and `v` share memory"),
            (torch.empty(2, 4, 130, 32, device="cuda", dtype=q.dtype), "`out` is"),
            (torch.empty(2, 4, 130, 64, device="cuda"), "`out` has elements of fp32"),
            (q.new_empty(q.numel() + 1)[1:].view_as(q), "starts at an address"),
        ):
            with pytest.raises(ArgumentError, match=message):
                kernel(q, k, v, out=wrong)


def test_tuning_finds_and_remembers_and_is_used(tmp_path, monkeypatch) -> None:
    from attngen.bench import sweep, tune

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal and q - k < n", params={"n": ("int", 100)})
    (case,) = sweep.cases(spec, [256], [], [], False, 512)
    said: list[str] = []
    outcome = tune.tune(case, {}, 3, said.append)
    assert outcome.of > 20
    assert outcome.kept
    assert any("compiled" in text for text in said)
    assert sum(t.planned for t in outcome.tried) == 1
    kernel = attngen.compile(spec, device="cuda")
    assert kernel.tuned == {outcome.bucket: outcome.winner}
    q = randn(2, 32, 256, 64)
    assert torch.equal(kernel(q, q, q), kernel(q, q, q, out=torch.empty_like(q)))
    exact = attngen.compile(spec, kernel="naive", device="cuda")(q, q, q)
    assert error(kernel(q, q, q), exact.double()) < 2e-2


def test_a_backward_is_tuned_by_itself(tmp_path, monkeypatch) -> None:
    from attngen.bench import sweep, tune

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    spec = attngen.define(dtype="bf16", head_dim=64, mask="causal", kernel="fused")
    (case,) = sweep.cases(spec, [256], [], [], False, 512)
    outcome = tune.tune(case, {}, 3, lambda said: None, ("q", "k", "v"))
    assert outcome.kept
    assert outcome.of > 5
    kernel = attngen.compile(spec, device="cuda")
    assert not kernel.tuned
    assert kernel.gradients(("q", "k", "v")).tuned == {outcome.bucket: outcome.winner}
    assert not kernel.gradients(("q",)).tuned
    q, dout = randn(2, 32, 256, 64), randn(2, 32, 256, 64)
    exact = attngen.compile(spec, kernel="naive", device="cuda").backward(dout, q, q, q)
    for name, found in kernel.backward(dout, q, q, q).items():
        assert error(found, exact[name].double()) < 0.1, name


def test_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((1, 2, 100, 64)).astype(cupy.float16) for _ in range(3))
    kernel = attngen.compile(ROOT / "specs" / "gpt2.attn", device="cuda")
    found = kernel(q, k, v)
    assert isinstance(found, cupy.ndarray)
    expected = scaled_dot_product_attention(*(torch.as_tensor(x, device="cuda").double() for x in (q, k, v)), is_causal=True)
    assert error(torch.as_tensor(found, device="cuda"), expected) < 4e-3


@pytest.mark.parametrize("library", ["cupy", "numba"])
def test_arrays_as_the_page_has_them(library: str) -> None:
    """The blocks of docs/python.md; the one of numba uses the kernel of the first."""
    pytest.importorskip(library)
    page = (ROOT / "docs" / "python.md").read_text()
    first, second = re.findall(r"^```py\n(.*?)^```", page[page.index("## Arrays of CuPy and numba") :], re.M | re.S)[:2]
    names: dict[str, Any] = {"attngen": attngen, "kernel": attngen.compile(attngen.load("gpt2"), device="cuda")}
    exec(first if library == "cupy" else second, names)
    tensors = [torch.as_tensor(names[name], device="cuda").double() for name in "qkvo"]
    assert type(names["o"]) is type(names["q"])
    assert error(tensors.pop(), scaled_dot_product_attention(*tensors, is_causal=True)) < 4e-3


@pytest.mark.parametrize("name", SHIPPED)
def test_small_shapes_for_the_sanitizer(name: str) -> None:
    """Every schedule of every spec at small odd shapes: run it under compute-sanitizer."""
    from attngen.reference.problems import Shape, sample
    from attngen.reference.torch_oracle import to_torch, torch_attention

    spec = shipped(name)
    for q_len, kv_len in ((1, 1), (7, 70), (70, 70)):
        problem = sample(spec, Shape(2, spec.q_heads or 2, spec.kv_heads or 1, q_len, kv_len), 0)
        tensors = [to_torch(t, "cuda") for t in (problem.q, problem.k, problem.v)]
        inputs = {n: to_torch(t, "cuda") for n, t in problem.inputs.items()}
        given = tensors if spec.values is None else tensors[:2]
        exact, _ = torch_attention(spec, *tensors, inputs=inputs)
        for schedule in schedules_for(spec, ARCHES["sm_90a"]):
            result = attngen.compile(spec, kernel=schedule, device="cuda")(*given, **inputs)
            output = result[0] if spec.lse else result
            assert error(output, exact) <= 0.05 * (1 + float(exact.abs().max())), (schedule, q_len, kv_len)


TILED = [(d, m, None) for d in (32, 64, 80, 96, 128, 160) for m in (None, "causal", "causal and window(100)")]


@pytest.mark.parametrize(("head_dim", "mask", "score"), [*TILED, *((d, "causal", "s - 0.1 * (q - k)") for d in (64, 128))])
def test_tiles_for_the_sanitizer(head_dim: int, mask: str | None, score: str | None) -> None:
    """Every tile that lengths may decide for, at odd shapes that would take another: run it under compute-sanitizer."""
    from attngen.reference.torch_oracle import torch_attention

    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, score=score)
    plans = plans_for(spec, ARCHES["sm_90a"], "hopper")
    assert len(plans) > 1
    for q_len, kv_len in ((7, 70), (300, 460)):
        q, k, v = (randn(2, 3, n, head_dim).bfloat16() for n in (q_len, kv_len, kv_len))
        exact, _ = torch_attention(spec, q, k, v)
        for plan in plans:
            stated = replace(spec, kernel=KernelRequest("hopper", plan.block_q, plan.block_kv, plan.stages))
            found = attngen.compile(stated, device="cuda")(q, k, v)
            assert error(found, exact) <= 0.01 * (1 + float(exact.abs().max())), (plan.block_q, plan.block_kv, q_len, kv_len)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_three_pieces_of_work_for_the_sanitizer(head_dim: int) -> None:
    """As many heads as give each block three, so that all buffers and places are used again: run it under compute-sanitizer."""
    heads = 3 * torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v = (randn(1, heads, n, head_dim).bfloat16() for n in (7, 70, 70))
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask="causal")
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert error(attngen.compile(spec, kernel="hopper", device="cuda")(q, k, v), exact) <= 0.05


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_split_operands_for_the_sanitizer(head_dim: int, precision: str) -> None:
    """fp32 on tensor cores at small odd shapes: run it under compute-sanitizer."""
    spec = attngen.define(dtype="fp32", head_dim=head_dim, mask="causal", precision=precision)
    for q_len, kv_len in ((1, 1), (7, 70), (200, 130)):
        q, k, v = (randn(2, 2, n, head_dim, dtype=torch.float32) for n in (q_len, kv_len, kv_len))
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        assert error(attngen.compile(spec, kernel="fused", device="cuda")(q, k, v), exact) <= 1e-4, (q_len, kv_len)


def test_bench_measures_what_it_says(tmp_path) -> None:
    """The command: every candidate in the table and the file, and every error small."""
    import json

    from click.testing import CliRunner

    from attngen.cli import main

    kept = tmp_path / "kept.json"
    arguments = ["bench", "gpt2", "--lengths", "128,300", "--tokens", "600", "--rounds", "3", "--json", str(kept)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    results = json.loads(kept.read_text())["results"]
    found = {r["candidate"] for r in results}
    assert {"attngen naive", "attngen tiled", "attngen fused", "torch math", "torch flash", "FlexAttention"} <= found
    assert len(results) == 2 * len(found)
    assert all(r["error"] < 0.02 and r["timing"]["median"] > 0 for r in results)
    assert all(name in done.output for name in found)


@pytest.mark.parametrize("shape", [(2, 300, 4, 64), (2, 4, 300, 128)])
def test_compiled_into_cuda_graphs_of_torch(shape: tuple[int, ...]) -> None:
    """Their pool is that of one call: what a first launch on a stream keeps is no part of it. Forward and backward."""
    layer = Attention(mask="causal", layout="bshd")
    compiled = torch.compile(lambda *tensors: layer(*tensors) * 2, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        q, k, v = (randn(*shape).requires_grad_() for _ in range(3))
        found = compiled(q, k, v)
        gradients = torch.autograd.grad(found.float().sum(), (q, k, v))
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        expected = scaled_dot_product_attention(*(t.float() for t in heads_first), is_causal=True).transpose(1, 2) * 2
        assert error(found, expected) <= 0.05
        for one, other in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
            assert error(one, other) <= 0.1
