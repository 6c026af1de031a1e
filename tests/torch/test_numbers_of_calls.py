"""Numbers that change from call to call compile no other kernel: scales, floats that functions close over, params, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen import sdpa  # noqa: E402
from attngen.device.emulated import EmulatedDevice  # noqa: E402
from attngen.torch import (  # noqa: E402
    Attention,
    attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    registry,
    runtime,
)
from tests import tiers  # noqa: E402

SIZE, HEADS, LENGTH = 24, 2, 12
MANY = [0.0107 + 0.002 * i for i in range(1000)]  # none is the default, 0, 1 or a number of the functions below
FEW = [0.3, 1e-3, 50.0, 0.0, -0.7, 3.0]
Call = Callable[[float], Any]


def random(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).half()


Q, K, V = (
    random(1, HEADS, LENGTH, SIZE),
    random(1, HEADS, LENGTH + 1, SIZE)[:, :, 1:],
    random(1, HEADS, LENGTH + 2, SIZE)[:, :, 2:],
)
ROWS = tuple(t.transpose(1, 2).contiguous() for t in (Q, K, V))
PACKED = tuple(t[0] for t in ROWS)
BEGINS = torch.tensor([0, LENGTH], dtype=torch.int32)
NAIVE = {"mode": "naive"}


def exact(scale: float = SIZE**-0.5, score: Any = None) -> Any:
    """O [batch, heads, length, size] in float64."""
    scores = Q.double() @ K.double().mT * scale
    if score is not None:
        at = torch.arange(LENGTH)
        scores = score(scores, at[:, None], at)
    return scores.softmax(-1) @ V.double()


def temperature(t: float) -> Any:
    return lambda s, b, h, q, k: s / t if t else s * t


def slope(t: float) -> Any:
    return lambda s, b, h, q, k: s - t * (q - k)


def several(t: float) -> Any:
    return lambda s, b, h, q, k: torch.sin(s / (t or 4.0)) * 2.0 + t * s


LAYER = Attention(score="s * t", params={"t": "float"}, mode="naive")
STATED = attngen.define(dtype="fp16", head_dim=SIZE, scale="t", params={"t": "float"})


def scaled_layer(t: float) -> Any:
    return Attention(mask="q - k < 100", scale=t, mode="naive")(Q, K, V)


SCALES: dict[str, Call] = {
    "attention": lambda t: attention(Q, K, V, scale=t, mode="naive"),
    "numpy": lambda t: torch.from_numpy(attngen.attention(*(x.numpy() for x in (Q, K, V)), scale=t, mode="naive")),
    "flash_attn_func": lambda t: flash_attn_func(*ROWS, softmax_scale=t, mode="naive").transpose(1, 2),
    "flash_attn_varlen_func": lambda t: flash_attn_varlen_func(
        *PACKED, BEGINS, BEGINS, LENGTH, LENGTH, softmax_scale=t, mode="naive"
    ).transpose(0, 1)[None],
    "flash_attn_with_kvcache": lambda t: flash_attn_with_kvcache(*ROWS, softmax_scale=t, mode="naive").transpose(1, 2),
    "torch's flash backend": lambda t: registry.sdpa_forward(Q, K, V, scale=t)[0],
    "flex_attention": lambda t: flex_attention(Q, K, V, scale=t, kernel_options=NAIVE),
    "Attention of a scale": lambda t: Attention(scale=t, mode="naive")(Q, K, V),
    "Attention of a mask and a scale": scaled_layer,
    "Attention in a cache": lambda t: Attention(mask="q - k < 100", scale=t, mode="naive").decode(Q, K, V),
}
OTHERS: dict[str, tuple[Call, Call]] = {
    "a param of Attention": (lambda t: LAYER(Q, K, V, t=t), lambda t: exact(t * SIZE**-0.5)),
    "a factor": (
        lambda t: flex_attention(Q, K, V, lambda s, b, h, q, k: s * t, kernel_options=NAIVE),
        lambda t: exact(t * SIZE**-0.5),
    ),
    "a divisor": (
        lambda t: flex_attention(Q, K, V, temperature(t), kernel_options=NAIVE),
        lambda t: exact(score=lambda s, q, k: temperature(t)(s, 0, 0, q, k)),
    ),
    "a slope": (
        lambda t: flex_attention(Q, K, V, slope(t), kernel_options=NAIVE),
        lambda t: exact(score=lambda s, q, k: slope(t)(s, 0, 0, q, k)),
    ),
    "several": (
        lambda t: flex_attention(Q, K, V, several(t), kernel_options=NAIVE),
        lambda t: exact(score=lambda s, q, k: several(t)(s, 0, 0, q, k)),
    ),
}

ALL: dict[str, Call] = {**SCALES, **{name: call for name, (call, _) in OTHERS.items()}}


class Nothing:
    """A compiled kernel that computes nothing."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def launch(self, *_: Any) -> None:
        pass


def forget() -> None:
    runtime.runtimes.clear()
    runtime.saving_runtime.cache_clear()
    runtime.backward_runtime.cache_clear()
    sdpa._standard.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts of the kernels that calls compile: these compute nothing, and no call meets one of an earlier test."""
    texts: list[str] = []

    def compile(device: EmulatedDevice, source: Any) -> Nothing:
        texts.append(source.text)
        return Nothing(source)

    forget()
    monkeypatch.setattr(EmulatedDevice, "compile", compile)
    yield texts
    forget()


@pytest.mark.parametrize(
    ("name", "count"),
    tiers.cases([(name, count) for name in ALL for count in (20, 1000)], quick=lambda _, count: count == 20, one_of=15),
)
def test_a_thousand_numbers_compile_one_kernel(name: str, count: int, compiled: list[str]) -> None:
    for number in MANY[:count]:
        ALL[name](number)
    assert len(compiled) == 1


@pytest.mark.parametrize("call", SCALES.values(), ids=SCALES)
def test_all_scales_have_three_kernels(call: Call, compiled: list[str]) -> None:
    for scale in (0.3, SIZE**-0.5, 0.0, -1.0, 1e30, 1e-30, 0.7, -2.0):
        call(scale)
    assert len(set(compiled)) == 3


@pytest.mark.parametrize("backward", [False, True])
def test_a_compiled_spec(compiled: list[str], backward: bool) -> None:
    kernel = attngen.compile(STATED, device="emulated", kernel="naive")
    arrays = [x.numpy() for x in (Q, K, V)]
    for number in MANY[:20]:
        kernel.backward(*arrays, *arrays[:1], t=number) if backward else kernel(*arrays, t=number)
    assert len(compiled) == 1


def test_ends_of_a_window(compiled: list[str]) -> None:
    for left in range(1, 20):
        flash_attn_func(*ROWS, window_size=(left, left + 1), mode="naive")
    assert len(compiled) == 1


@pytest.mark.parametrize("name", SCALES)
def test_results_of_scales(name: str) -> None:
    for scale in (*FEW, SIZE**-0.5):
        torch.testing.assert_close(SCALES[name](scale).double(), exact(scale), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_results_of_other_numbers(name: str) -> None:
    call, expected = OTHERS[name]
    for number in FEW:
        torch.testing.assert_close(call(number).double(), expected(number), atol=3e-3, rtol=3e-3)


def test_gradients_of_scales() -> None:
    for scale in (0.3, 0.0, -0.7, SIZE**-0.5):
        q, wide = Q.clone().requires_grad_(), Q.double().requires_grad_()
        found = attention(q, K, V, scale=scale, mode="naive")
        expected = (wide @ K.double().mT * scale).softmax(-1) @ V.double()
        grads = [torch.autograd.grad((o.double() ** 2).sum(), x)[0].double() for o, x in ((found, q), (expected, wide))]
        torch.testing.assert_close(*grads, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39])
def test_scales_that_are_no_number_of_fp32(scale: float) -> None:
    for call in (SCALES["attention"], SCALES["numpy"], SCALES["flash_attn_func"], SCALES["flex_attention"]):
        with pytest.raises(attngen.ArgumentError, match=r"`(softmax_)?scale` is .*; expected a finite number of fp32"):
            call(scale)


def test_a_softcap_is_a_constant(compiled: list[str]) -> None:
    """With a bound of its scores, a kernel of bf16 needs no maximum of rows."""
    q = Q.bfloat16()
    for cap in (20.0, 30.0):
        flex_attention(q, q, q, lambda s, b, h, i, j, cap=cap: cap * torch.tanh(s / cap), kernel_options=NAIVE)
        flash_attn_func(q, q, q, softcap=cap, mode="naive")
    assert len(set(compiled)) == 4
    assert all("20.0" in text or "30.0" in text for text in compiled)


def test_a_name_that_the_caller_uses(compiled: list[str]) -> None:
    """A param of a layer may be called as that of the scale would be."""
    layer = Attention(score="s * softmax_scale", params={"softmax_scale": "float"}, scale=0.5, mode="naive")
    for number in (0.3, 0.4):
        layer(Q, K, V, softmax_scale=number)
    assert len(compiled) == 1


@pytest.mark.parametrize("name", ["attention", "flash_attn_func", "flex_attention"])
def test_torch_compile_compiles_no_other_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a constant of the number and traces again, up to its limit; the graphs share a kernel."""
    made, compile = [], EmulatedDevice.compile
    forget()
    monkeypatch.setattr(EmulatedDevice, "compile", lambda device, source: made.append(source) or compile(device, source))
    torch._dynamo.reset()
    call = torch.compile(SCALES[name], fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.4, 2.0):
        torch.testing.assert_close(call(scale).double(), exact(scale), atol=3e-3, rtol=3e-3)
    assert len(made) == 1
