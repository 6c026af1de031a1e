"""Prepared calls, which a GPU repeats with other addresses, on an emulated device that repeats launches too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen import ArgumentError  # noqa: E402
from attngen.device.arrays import view  # noqa: E402
from attngen.device.binding import bind, sizes_of  # noqa: E402
from attngen.torch import (  # noqa: E402
    Attention,
    attention,
    backward,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    front,
    operator,
    prepared,
    runtime,
)
from attngen.torch.description import fixed_text  # noqa: E402
from attngen.torch.operator import attention_operator, full_operator  # noqa: E402
from attngen.torch.prepared import PreparedCall, Remembered  # noqa: E402
from attngen.torch.runtime import Runtime  # noqa: E402
from tests import tiers  # noqa: E402
from tests.device.programs import SCALE, backward_problem, backward_program, expected_gradients  # noqa: E402
from tests.device.repeating import STREAM, RepeatingDevice  # noqa: E402

COUNTER = torch.zeros(1, dtype=torch.int32)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "raw_stream", lambda index: STREAM)
    monkeypatch.setattr(prepared, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(prepared, "_counters", {(None, STREAM): COUNTER.data_ptr()})


def on_gpu(arch: str = "sm_80", **described: Any) -> Runtime:
    spec = attngen.define(dtype="bf16", head_dim=16, mask="causal", **described)
    return Runtime(attngen.compile(spec, device=RepeatingDevice(checked=False, arch=arch)), repeats=True)


def problem(length: int = 40) -> tuple[Any, ...]:
    return tuple(torch.randn(1, 2, length, 16).to(torch.bfloat16) for _ in range(3))


def reference(q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)


@pytest.mark.parametrize(("schedule", "arch"), [("fused", "sm_80"), ("hopper", "sm_90a"), ("tiled", "sm_80")])
def test_a_repeated_call_computes_the_same_of_other_tensors(schedule: str, arch: str) -> None:
    kernel = on_gpu(arch, lse=True, kernel=schedule)
    for _ in range(2):
        q, k, v = problem()
        output, lse = kernel((q, k, v))
        torch.testing.assert_close(output.float(), reference(q, k, v), atol=0.02, rtol=0.02)
        scores = (q.float() @ k.float().mT / 4).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-3, rtol=1e-3)
    assert len(kernel._calls) == 1


def test_a_longer_length_is_checked_anew() -> None:
    """The lengths of a call are part of its signature: captured tensors are compared with each."""
    described = {"score": "s + f[k]", "inputs": {"f": ("fp32", ("kv_len",))}, "storage": "packed", "kernel": "naive"}
    spec = attngen.define(dtype="bf16", head_dim=16, **described)
    kernel = Runtime(attngen.compile(spec, device=RepeatingDevice(checked=False)), repeats=True)
    q, begins, f = torch.randn(6, 2, 16).bfloat16(), torch.tensor([0, 3, 6], dtype=torch.int32), torch.randn(3)
    for _ in range(2):
        kernel((q, q, q, begins, begins, f), (3, 3))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"`f` is \[3\].*at least kv_len = 4"):
            kernel((q, q, q, begins, begins, f), (3, 4))


@pytest.mark.parametrize("shape", [(2, 40, 2, 16), (2, 2, 2, 16), (2, 40, 16), (40, 16)])
def test_a_repeated_call_has_the_layout_of_the_first(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads after rows, as many as rows too, and heads and batch left out: the program sees views of what the caller gives."""
    compiled = attngen.compile(attngen.define(dtype="bf16", head_dim=16, mask="causal"), device=RepeatingDevice(checked=False))
    monkeypatch.setattr(runtime, "runtimes", runtimes := {})
    for module in (operator, front):
        monkeypatch.setattr(module, "runtimes", runtimes)
    monkeypatch.setattr(
        operator, "runtime", lambda text, device: runtimes.setdefault((text, device), Runtime(compiled, repeats=True))
    )
    layer = Attention(mask="causal", layout="bshd" if len(shape) == 4 else "bhsd")
    calls = []
    monkeypatch.setattr(front.Call, "run", lambda call, run=front.Call.run: calls.append(call) or run(call))
    for _ in range(3):
        q, k, v = (torch.randn(shape).to(torch.bfloat16) for _ in range(3))
        seen = [t.transpose(1, 2) if len(shape) == 4 else t for t in (q, k, v)]
        expected = reference(*seen)
        found = layer(q, k, v)
        torch.testing.assert_close(
            found.float(), expected.transpose(1, 2) if len(shape) == 4 else expected, atol=0.02, rtol=0.02
        )
    assert len(calls) == 1, "later calls repeat the first"


ROWS = (torch.randn(1, 24, 2, 16).bfloat16(), torch.randn(1, 24, 2, 16).bfloat16())
BEGINS = torch.tensor([0, 24], dtype=torch.int32)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, **named: attention(*(t.transpose(1, 2) for t in (q, k, k)), **named),
    "flash_attn_func": lambda q, k, **named: flash_attn_func(q, k, k, **named),
    "flash_attn_varlen_func": lambda q, k, **named: flash_attn_varlen_func(q[0], k[0], k[0], BEGINS, BEGINS, 24, 24, **named),
    "flash_attn_with_kvcache": lambda q, k, return_lse=False: flash_attn_with_kvcache(
        q, k, k, cache_seqlens=BEGINS[1:], return_softmax_lse=return_lse
    ),
    "Attention.decode": lambda q, k, return_lse=False: DECODERS[return_lse].decode(q, k, k),
}
DECODERS = [Attention(return_lse=returns, layout="bshd") for returns in (False, True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_repeated_function_returns_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lse and without: launches have no output for what nobody wants."""
    for module in (runtime, operator, front):
        monkeypatch.setattr(module, "runtimes", {} if module is runtime else runtime.runtimes)
    device = RepeatingDevice(checked=False, arch="sm_80")
    monkeypatch.setattr(runtime, "compile_later", lambda spec, _: attngen.compile(spec, device=device))
    monkeypatch.setattr(runtime, "Runtime", lambda compiled: Runtime(compiled, repeats=True))
    runs = []
    monkeypatch.setattr(front.Call, "run", lambda call, run=front.Call.run: runs.append(call) or run(call))
    for named in ({}, {"return_lse": True}):
        first, again = (FUNCTIONS[name](*ROWS, **named) for _ in range(2))
        torch.testing.assert_close(again, first, atol=0, rtol=0)
        assert isinstance(first, tuple) == bool(named)
    assert len(runs) == 2, "second calls repeat the first ones"


def test_outputs_of_the_caller_are_written_and_checked() -> None:
    kernel = on_gpu(lse=True)
    q, k, v = problem()
    out = torch.empty(1, 40, 2, 16, dtype=torch.bfloat16).transpose(1, 2)
    given, lse = kernel((q, k, v), outputs=(out, None))
    assert given is out
    torch.testing.assert_close(out.float(), reference(q, k, v), atol=0.02, rtol=0.02)
    assert lse.shape == (1, 2, 40)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="`out` and `k` share memory"):
            kernel((q, k, v), outputs=(k, None))


def test_tensors_that_are_not_aligned_are_checked_anew() -> None:
    kernel = on_gpu()
    q, k, v = problem()
    kernel((q, k, v))
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(ArgumentError, match="`q` starts at an address that is not a multiple of 16 bytes"):
        kernel((shifted, k, v))


def test_wrong_numbers_of_arguments_are_named() -> None:
    kernel = on_gpu()
    q, k, v = problem()
    with pytest.raises(ArgumentError, match="4 tensors were given; this attention takes 3: q, k, v"):
        kernel((q, k, v, v))


@pytest.fixture
def own_training() -> Iterator[None]:
    """Kernels of trainings are those of this test."""
    kinds = (runtime.saving_runtime, runtime.backward_runtime)
    for kind in kinds:
        kind.cache_clear()
    yield
    for kind in kinds:
        kind.cache_clear()


@pytest.mark.usefixtures("own_training")
@pytest.mark.parametrize("schedule", tiers.cases(["naive", "fused"], quick=["naive"]))
def test_a_repeated_backward_plans_and_checks_nothing(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = attngen.define(
        dtype="bf16",
        head_dim=16,
        mask="causal",
        score="alibi(slopes)",
        kernel=schedule,
        inputs={"slopes": ("fp32", ("heads",))},
    )
    compiled = attngen.compile(spec, device=RepeatingDevice(checked=False, arch="sm_80"))
    text = fixed_text(spec, None)
    monkeypatch.setattr(runtime, "runtimes", {(text, torch.device("cpu")): Runtime(compiled, repeats=True)})
    monkeypatch.setattr(backward, "_calls", Remembered())
    for attempt in range(3):
        if attempt:
            monkeypatch.setattr(Runtime, "bind", None)
            monkeypatch.setattr(backward, "_checked", None)
        q, k, v = (t.requires_grad_() for t in problem())
        slopes = torch.tensor([0.5, 0.25], requires_grad=True)
        output, _ = attention_operator(q, k, v, text, [slopes])
        found = torch.autograd.grad(output.float().sin().sum(), (q, k, v, slopes))
        distance = torch.arange(40) - torch.arange(40)[:, None]
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
        inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=bias)
        expected = torch.autograd.grad(exact.sin().sum(), (*inputs, slopes))
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own.float(), other, atol=0.03, rtol=0.03)
        with torch.no_grad():  # the operators of a compiled step
            out, lse, lse_rest = full_operator(q, k, v, text, [slopes], [], [], True, False)
            names = ("q", "k", "v", "slopes")
            kept = backward.saved_by(text, q.device, names, False)
            saved = (t if name in kept else None for name, t in (("out", out), ("lse", lse), ("lse_rest", lse_rest)))
            dout = output.float().cos().to(q.dtype)
            again = backward.backward_operator(dout, None, q, k, v, text, [slopes], [], [], *saved, names, False)
        for own, other in zip(again, expected, strict=True):
            torch.testing.assert_close(own.float(), other, atol=0.03, rtol=0.03)


def test_a_backward_program_is_prepared_and_repeated() -> None:
    device = RepeatingDevice(checked=False)
    kernel = device.compile(backward_program())
    given = backward_problem()
    arrays = {name: view(torch.from_numpy(array), name) for name, array in given.items()}
    call = PreparedCall(bind(kernel, sizes_of(kernel.source, device, arrays), arrays, {"scale": SCALE}))
    moved = [torch.from_numpy(array.copy()) for array in given.values()]
    results = call(moved)
    assert results is not None
    for gradient, expected in zip(results, expected_gradients(given).values(), strict=True):
        torch.testing.assert_close(gradient.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-4)
