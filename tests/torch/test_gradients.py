"""Gradients in torch: `requires_grad` works in every way to call attention, by the kernels of the emulated device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402

import attngen  # noqa: E402
from attngen import ArgumentError, PlanRefusal  # noqa: E402
from attngen.device.emulated import EmulatedDevice  # noqa: E402
from attngen.spec.gradient import GradientError  # noqa: E402
from attngen.torch import Attention, attention, flash_attn_varlen_func, flops, runtime  # noqa: E402
from attngen.torch.backward import backward_operator  # noqa: E402
from attngen.torch.description import fixed_text  # noqa: E402
from attngen.torch.operator import attention_operator, full_operator  # noqa: E402
from tests import tiers  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.torch.gpt import Gpt, torch_attend  # noqa: E402
from tests.torch.specs import CASES, Case  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
BACKEND = "aot_eager"
FP32 = {"atol": 2e-6, "rtol": 2e-5}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mode: Any = "naive", **more: Any) -> Any:
    """Causal attention; the default schedule is the one that compiles fastest."""
    return attention(q, k, v, is_causal=True, mode=mode, **more)


def gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of a loss of `function`'s result by all `tensors`."""
    output = function(*tensors)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(output.dtype)
    found: tuple[torch.Tensor, ...] = torch.autograd.grad((output * weights).sum(), tensors)
    return found


def expected_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return gradients(lambda q, k, v: sdpa(q, k, v, is_causal=True), *tensors)


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    return randn(2, 2, 5, 8), randn(2, 2, 6, 8), (randn(2, 2, 6, 8).detach() - 0.5).requires_grad_()


@contextmanager
def kernel_calls() -> Iterator[list[tuple[str, ...]]]:
    """The outputs of each kernel that runs."""
    calls: list[tuple[str, ...]] = []
    run = runtime.Runtime.__call__

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(self.output_names)
        return run(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.Runtime, "__call__", counted)
        yield calls


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", tiers.cases(["auto", "naive"], quick=["auto"]))
def test_gradients_are_those_of_torch(mode: str, qkv: tuple[torch.Tensor, ...]) -> None:
    expected = expected_gradients(*qkv)
    torch.testing.assert_close(gradients(lambda *t: causal(*t, mode=mode), *qkv), expected, **FP32)
    spec = attngen.define(dtype="fp32", head_dim=8, mask="causal", kernel="naive")
    for call in (Attention(spec), attngen.compile(spec, device="emulated"), Attention(mask="causal", mode="naive")):
        torch.testing.assert_close(gradients(call, *qkv), expected, **FP32)


EVERY = [(name, mode) for name in CASES for mode in ("auto", "naive")]


@pytest.mark.parametrize(("name", "mode"), tiers.cases(EVERY, quick=[("head", "auto"), ("sink", "naive")]))
def test_gradients_of_captured_tensors_of_every_class(name: str, mode: str) -> None:
    """Gradients through O and lse; those of a row without keys are 0."""
    case = CASES[name]
    found, expected = (_by_mode(case, m) for m in (mode, "math"))
    torch.testing.assert_close(found, expected, **FP32)


def test_several_programs_compute_the_gradients_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs whose fastest schedule has those of q, k and v alone."""
    in_parts = lambda self, wanted, *others: tuple(w for w in (wanted[:3], wanted[3:]) if w)  # noqa: E731
    monkeypatch.setattr(attngen.api.CompiledAttention, "gradient_parts", in_parts)
    slopes = torch.rand(2).requires_grad_()
    tensors = *(randn(1, 2, n, 8) for n in (7, 9, 9)), slopes
    layer = {
        m: Attention(score="alibi(slopes) + 1.25", inputs={"slopes": ("fp32", ("heads",))}, mode=m) for m in ("fused", "math")
    }
    with kernel_calls() as calls:
        found = gradients(lambda q, k, v, slopes: layer["fused"](q, k, v, slopes=slopes), *tensors)
    assert calls[-2:] == [("dq", "dk", "dv"), ("d_slopes",)]
    torch.testing.assert_close(
        found, gradients(lambda q, k, v, slopes: layer["math"](q, k, v, slopes=slopes), *tensors), **FP32
    )


def _by_mode(case: Case, mode: str) -> dict[str, torch.Tensor]:
    tensors = case.tensors(torch.float32)
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
    result = Attention(case.spec(), mode=mode)(q, k, v, **tensors)
    output, lse = result if case.spec().lse else (result, None)
    loss = output.sin().sum() if lse is None else output.sin().sum() + lse.clamp(min=-9).cos().sum()
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def test_what_autograd_hands_to_the_backward_may_begin_anywhere(qkv: tuple[torch.Tensor, ...]) -> None:
    """Kernels copy 16 bytes at a time."""

    def beside(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *tensors: torch.cat([torch.ones(3), attend(*tensors).flatten()])  # its gradient is cut in two

    pool = torch.empty(4096)

    def stored(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal pool
        place, pool = pool[1 : 1 + tensor.numel()].view(tensor.shape), pool[1 + tensor.numel() :]
        return place.copy_(tensor)

    attend = lambda *t: causal(*t, mode="auto")  # noqa: E731
    expected = gradients(beside(lambda *t: sdpa(*t, is_causal=True)), *qkv)
    torch.testing.assert_close(gradients(beside(attend), *qkv), expected, **FP32)
    expected = expected_gradients(*qkv)
    for hooks in ((stored, lambda t: t), (lambda t: t.mT.contiguous(), lambda t: t.mT)):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            torch.testing.assert_close(gradients(attend, *qkv), expected, **FP32)
    begins = torch.tensor([0, 2, 10], dtype=torch.int32)
    packed = [torch.arange(161.0)[1:].view(10, 2, 8).sin().requires_grad_() for _ in range(3)]
    found, aligned = (
        gradients(beside(lambda *t: flash_attn_varlen_func(*t, begins, begins, 8, 8)), *tensors)
        for tensors in (packed, [t.detach().clone().requires_grad_() for t in packed])
    )
    torch.testing.assert_close(found, aligned, rtol=0, atol=0)


@pytest.mark.parametrize("name", tiers.cases(CASES, quick=["head"]))
def test_gradcheck_in_fp32(name: str) -> None:
    """Central differences over 2 * 0.03 in fp32 have errors of 1e-6 / 0.06 by rounding and of 0.03 ** 2 by curvature."""
    case = CASES[name]
    tensors = case.tensors(torch.float32)
    names = [n for n, t in tensors.items() if t.requires_grad]
    layer = Attention(case.spec(kernel="naive"))

    def function(*values: torch.Tensor) -> Any:
        given = {**tensors, **dict(zip(names, values, strict=True))}
        q, k, v = (given.pop(n) for n in ("q", "k", "v"))
        result = layer(q, k, v, **given)
        return (result[0], result[1].clamp(min=-9)) if case.spec().lse else result

    inputs = tuple(tensors[n] for n in names)
    assert torch.autograd.gradcheck(function, inputs, eps=0.03, atol=6e-3, rtol=6e-3, fast_mode=True, nondet_tol=0.0)


def test_only_what_is_wanted_is_computed(qkv: tuple[torch.Tensor, ...]) -> None:
    q, k, v = qkv
    with kernel_calls() as calls:
        causal(q.detach(), k.detach(), v.detach())
        output = causal(q.detach(), k.detach(), v)
        output.sum().backward()
    assert calls[0] == ("out",)
    assert calls[-1] == ("dv",)
    assert v.grad is not None
    with torch.no_grad():
        assert not causal(q, k, v).requires_grad
    output, lse = causal(q, k, v, return_lse=True)
    (by_lse,) = torch.autograd.grad(lse.sum(), k, retain_graph=True)
    theirs = torch.autograd.grad(causal(q, k, v, return_lse=True, mode="math")[1].sum(), k)
    torch.testing.assert_close((by_lse,), theirs, **FP32)
    assert torch.autograd.grad(output.sum(), q)[0].abs().max() > 0


@pytest.mark.long
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_lie_as_their_tensors_do_and_are_as_exact(layout: str, dtype: torch.dtype) -> None:
    shape = (2, 9, 3, 2, 16) if layout == "bshd" else (2, 2, 3, 9, 16)
    packed = randn(*shape, dtype=dtype)

    def by(function: Callable[..., Any], packed: torch.Tensor) -> torch.Tensor:
        q, k, v = packed.unbind(2)
        if layout == "bshd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return function(q, k, v)

    exact = gradients(lambda t: by(lambda *t: sdpa(*t, is_causal=True), t), packed.double().detach().requires_grad_())[0]
    theirs = gradients(lambda t: by(lambda *t: sdpa(*t, is_causal=True), t), packed)[0]
    ours = gradients(lambda t: by(lambda *t: causal(*t, mode="auto"), t), packed)[0]
    limit = 2 * (theirs.double() - exact).abs().max() + torch.finfo(dtype).eps
    assert (ours.double() - exact).abs().max() <= limit
    assert ours.stride() == packed.stride()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused_and_say_what_has_them(qkv: tuple[torch.Tensor, ...]) -> None:
    q, k, v = qkv
    (first,) = torch.autograd.grad(causal(q, k, v).sum(), q, create_graph=True)
    for call in (
        lambda: first.sum().backward(),
        lambda: torch.func.hessian(lambda q: causal(q, k, v).sum())(q.detach()),
        lambda: torch.func.grad(lambda q: torch.func.grad(lambda q: causal(q, k, v).sum())(q).sum())(q.detach()),
    ):
        with pytest.raises(GradientError, match='mode="math"'):
            call()


def test_no_gradient_is_lost_silently(qkv: tuple[torch.Tensor, ...]) -> None:
    q, k, v = qkv
    limit = torch.tensor(0.5, requires_grad=True)
    masked = Attention(mask="float(q - k) < limit", inputs={"limit": ("fp32", ())}, mode="naive")
    with pytest.raises(GradientError, match="`limit` has no gradient: only the mask reads it"):
        masked(q, k, v, limit=limit)
    kernel = attngen.compile(attngen.define(dtype="fp32", head_dim=8), device="emulated", kernel="naive")
    with pytest.raises(ArgumentError, match="`q` requires grad, and this call records no gradient"):
        kernel(q, k, k, out=torch.empty(2, 2, 5, 8))
    for place in ({"device": "emulated", "arch": "sm_80"}, {"device": "emulated:fast"}, {"device": EmulatedDevice()}):
        elsewhere = attngen.compile(kernel.spec, kernel="naive", **place)
        with pytest.raises(ArgumentError, match="without `arch`, for a device that `device` names"):
            elsewhere(q, k, k)
    half = [t.detach().repeat(1, 1, 1, 8).bfloat16().requires_grad_() for t in qkv]
    with pytest.raises(PlanRefusal, match="gradients by wgmma"):
        attention(*half, mode="wgmma")


# --- what torch does with operators -----------------------------------------------------------------------------------


def test_operations_are_counted_as_those_of_torchs_attention() -> None:
    """On meta, where nothing runs and only the longest length is known."""

    def counted(function: Callable[[], torch.Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            function().sum().backward()
        return int(counter.get_total_flops())

    q, k, v = (torch.randn(2, h, n, d, device="meta").requires_grad_() for h, n, d in ((4, 20, 16), (2, 12, 16), (2, 12, 8)))
    forward, backward = (
        sdpa_flop_count(*(t.shape for t in (q, k, v))),
        sdpa_backward_flop_count((2, 4, 20, 8), q.shape, k.shape, v.shape),
    )
    assert counted(lambda: attention(q, k, v, enable_gqa=True)) == forward + backward
    product = 2 * 2 * 4 * 20 * 12
    assert counted(lambda: attention(q.detach(), k.detach(), v, enable_gqa=True)) == forward + product * (16 + 8)
    assert counted(lambda: attention(q, k.detach(), v.detach(), enable_gqa=True)) == forward + product * (16 + 8 + 16)
    packed = [torch.randn(20, 2, 16, device="meta").requires_grad_() for _ in range(3)]
    begins = torch.zeros(3, dtype=torch.int32, device="meta")
    assert counted(lambda: flash_attn_varlen_func(*packed, begins, begins, 15, 15)) == 7 * 2 * 2 * 16 * (2 * 15 * 15)
    spec = fixed_text(attngen.define(dtype="fp32", head_dim=16, kernel="naive", storage="packed"), None)
    begins = torch.tensor([0, 5, 20], dtype=torch.int32)
    assert flops.of_forward(*packed, spec, [begins, begins], [15, 15], out_val=None) == 2 * 2 * 2 * 16 * (5 * 5 + 15 * 15)
    spec = fixed_text(attngen.define(dtype="fp32", head_dim=16, kernel="naive", storage="padded"), None)
    given = spec, [torch.tensor([3, 12], dtype=torch.int32)], [12]
    assert flops.of_forward(q, k, k, *given, out_val=None) == 2 * 2 * 4 * 20 * 16 * (3 + 12)


def test_opcheck(qkv: tuple[torch.Tensor, ...]) -> None:
    spec = attngen.define(
        dtype="fp32", head_dim=8, mask="q - k < n", score="s * c + bias[h]", lse=True, kernel="naive",
        inputs={"bias": ("fp32", ("heads",))}, params={"n": ("int", 5), "c": ("float", 0.5)},
    )  # fmt: skip
    text, bias = fixed_text(spec, None), randn(2)
    for operator, arguments in (
        (attention_operator, (*qkv, text, [bias], [5], [0.5])),
        (full_operator, (*qkv, text, [bias], [5], [0.5], False, None)),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}
    q, k, v = (t.detach() for t in qkv)
    out, lse = attention_operator(q, k, v, text, [bias.detach()], [5], [0.5])
    lists = (text, [bias.detach()], [5], [0.5])
    arguments = (out, lse, q, k, v, *lists, out, lse, None, ["q", "v", "bias"], None)
    assert set(torch.library.opcheck(backward_operator, arguments).values()) == {"SUCCESS"}


def test_compiled_without_a_break(qkv: tuple[torch.Tensor, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: causal(q * 1, k, v), fullgraph=True, dynamic=True, backend=BACKEND)
    for length in (5, 3):
        q = qkv[0][:, :, :length].detach().requires_grad_()
        torch.testing.assert_close(gradients(compiled, q, *qkv[1:]), expected_gradients(q, *qkv[1:]), **FP32)


def test_transforms_of_torch_func(qkv: tuple[torch.Tensor, ...]) -> None:
    """vmap folds its dimension into batch: one call of the kernels for all samples, unless a captured tensor prevents it."""
    q, k, v = (t.detach() for t in qkv)
    many = torch.stack([q, -q, 2 * q])
    loss = lambda q, k: causal(q, k, v).sin().sum()  # noqa: E731
    theirs = lambda q, k: sdpa(q, k, v, is_causal=True).sin().sum()  # noqa: E731
    for argnums, in_dims in ((0, (0, None)), (1, (0, None))):
        with kernel_calls() as calls:
            found = torch.vmap(torch.func.grad(loss, argnums), in_dims=in_dims)(many, k)
        assert len(calls) == 2
        expected = torch.vmap(torch.func.grad(theirs, argnums), in_dims=in_dims)(many, k)
        torch.testing.assert_close(found, expected, **FP32)
    whole = lambda f: torch.func.grad(lambda many: torch.vmap(lambda q: f(q, k))(many).sum())(many)  # noqa: E731
    torch.testing.assert_close(whole(loss), whole(theirs), **FP32)
    layer = Attention(score="alibi(slopes)", inputs={"slopes": ("fp32", ("heads",))}, mode="naive")
    slopes = torch.randn(3, 2)
    by_sample = torch.func.grad(lambda s, q: layer(q, k, v, slopes=s).sin().sum())
    for dims, count in (((0, 0), 6), ((None, 0), 2 + 3 - 1)):
        with kernel_calls() as calls:
            found = torch.vmap(by_sample, in_dims=dims)(slopes if dims[0] == 0 else slopes[0], many)
        assert len(calls) == count
        each = [by_sample(slopes[i] if dims[0] == 0 else slopes[0], many[i]) for i in range(3)]
        torch.testing.assert_close(found, torch.stack(each), **FP32)


def test_vmap_of_what_cannot_be_folded_is_right(qkv: tuple[torch.Tensor, ...]) -> None:
    q, k, v = (t.detach() for t in qkv)
    masks, lengths = torch.rand(3, 5, 6) < 0.7, torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    padded = Attention(mask="padding(lengths)", inputs={"lengths": ("int32", ("batch",))}, mode="naive")
    shifted = Attention(score="s + float(b) * k", mode="naive")
    many = torch.stack([q, -q, 2 * q])
    for function, arguments, count in (
        (lambda mask: attention(q, k, v, attn_mask=mask, mode="naive"), (masks,), 1),
        (lambda q, lengths: padded(q, k, v, lengths=lengths), (many, lengths), 1),
        (lambda q: shifted(q, k, v), (many,), 3),
    ):
        with kernel_calls() as calls:
            found = torch.vmap(function)(*arguments)
        assert len(calls) == count
        each = [function(*(argument[i] for argument in arguments)) for i in range(3)]
        torch.testing.assert_close(found, torch.stack(each))


def test_activation_checkpoints(qkv: tuple[torch.Tensor, ...]) -> None:
    """The forward is recomputed in the backward, or saved if the policy of a selective checkpoint names the operator."""
    expected = expected_gradients(*qkv)

    def keeping() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.attngen.attention.full])

    for contexts, forwards in (({}, 2), ({"context_fn": keeping}, 1)):
        with kernel_calls() as calls:
            found = gradients(lambda *t, c=contexts: checkpoint(causal, *t, use_reentrant=False, **c), *qkv)
        torch.testing.assert_close(found, expected, **FP32)
        assert len(calls) == forwards + 1


def test_autocast_casts_queries_keys_and_values_alone(qkv: tuple[torch.Tensor, ...]) -> None:
    slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    layer = Attention(mask="causal", score=lambda s, b, h, q, k: s + slopes[h] * (k - q), mode="naive")
    plain = causal(*qkv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, biased = causal(*qkv), layer(*qkv)
    assert (plain.dtype, output.dtype, biased.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(output.float(), plain, atol=0.03, rtol=0.03)
    biased.float().sum().backward()
    assert layer.slopes.grad.dtype is qkv[0].grad.dtype is torch.float32
    stated = Attention(attngen.define(dtype="fp32", head_dim=8, mask="causal", kernel="naive"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stated(*qkv).dtype is torch.float32


@pytest.mark.parametrize("switch", [False, True])
def test_gradients_are_deterministic_if_the_call_or_else_torchs_switch_says_so(
    switch: bool, qkv: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    run = runtime.Runtime.__call__

    def seen(self: Any, *arguments: Any, **named: Any) -> Any:
        plans.append(self.compiled.plan)
        return run(self, *arguments, **named)

    monkeypatch.setattr(runtime.Runtime, "__call__", seen)
    layers = {said: Attention(mask="causal", mode="naive", deterministic=said) for said in (None, True, False)}
    expected = gradients(causal, *qkv)
    torch.use_deterministic_algorithms(switch)
    try:
        for said, layer in layers.items():
            for function in (layer, lambda *t, d=said: causal(*t, deterministic=d)):
                found = gradients(function, *qkv)
                assert plans[-1].wanted
                assert plans[-1].facts.deterministic is (switch if said is None else said)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "naive has one order"
    finally:
        torch.use_deterministic_algorithms(False)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_small_gpt_has_the_gradients_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = (Gpt(attend, width=32) for attend in (Attention(mask="causal", layout="bshd", mode="naive"), torch_attend))
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(256, (2, 9))
    for model in (ours, theirs):
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    torch.testing.assert_close(ours(tokens), theirs(tokens), atol=1e-5, rtol=1e-5)
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_have_the_gradients_of_one(kind: str) -> None:
    """Captured parameters are parameters of the model: DDP reduces them and FSDP shards them like all others."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    ran = subprocess.run([sys.executable, "-m", "tests.torch.distributed", kind], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.long
def test_scores_of_the_lowest_number_are_trained() -> None:
    """One fp32 number cannot hold the lse of a row whose scores are all finfo.min: the forward saves two."""
    q, k, v = randn(1, 2, 20, 16), randn(1, 2, 20, 16), randn(1, 2, 20, 16)
    mask = torch.zeros(20, 20).masked_fill(torch.rand(20, 20) < 0.5, torch.finfo(torch.float32).min)
    mask[3] = torch.finfo(torch.float32).min
    with kernel_calls() as calls:
        found = gradients(lambda *t: attention(*t, attn_mask=mask), q, k, v)
    assert calls[0] == ("out", "lse", "lse_rest")
    # torch's own flash attention on the CPU loses the logarithm here: its gradients of row 3 are 20 times too large
    torch.testing.assert_close(found, gradients(lambda *t: attention(*t, attn_mask=mask, mode="math"), q, k, v), **FP32)


@pytest.mark.long
def test_a_small_gpt_trains_as_with_torch() -> None:
    """The loss of every training step is the same in eager mode, compiled and with checkpointing."""
    torch._dynamo.reset()
    losses = {}
    for name in ("theirs", "ours", "compiled", "checkpointed"):
        torch.manual_seed(0)
        own = Attention(mask="causal", layout="bshd", mode="naive")
        attend = torch_attend if name == "theirs" else own
        if name == "checkpointed":
            attend = lambda *t, own=own: checkpoint(own, *t, use_reentrant=False)  # noqa: E731
        model = Gpt(attend, width=16, heads=2)
        step = torch.compile(model, fullgraph=True, backend=BACKEND) if name == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
        losses[name] = []
        for _ in range(8):
            loss = torch.nn.functional.cross_entropy(step(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            losses[name].append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses["ours"][-1] < losses["ours"][0] - 1
    for name in ("ours", "compiled", "checkpointed"):
        assert losses[name] == pytest.approx(losses["theirs"], abs=2e-3)


@pytest.mark.parametrize("mode", ["naive", "fused"])
def test_a_broadcast_mask_has_gradients_of_0_in_an_empty_batch(mode: str) -> None:
    """The mask has elements although the call has no pair: a kernel has to write them."""
    inputs = {"bias": ("fp32", ("batch", "heads", "q_len", "kv_len"))}
    text = fixed_text(attngen.define(dtype="fp32", head_dim=16, score="s + bias[b, h, q, k]", inputs=inputs), mode)
    found = runtime.backward_runtime(text, torch.device("cpu"), ("bias",), True)
    for batch, heads, bias in (
        (0, 2, (1, 1, 5, 6)),
        (0, 2, (1, 2, 5, 6)),
        (2, 0, (2, 1, 1, 6)),
        (0, 0, (1, 0, 5, 6)),
        (0, 0, (1, 1, 1, 1)),
    ):
        rows, keys = torch.zeros(batch, heads, 5, 16), torch.zeros(batch, heads, 6, 16)
        lse = torch.zeros(batch, heads, 5)
        tensors = {"q": rows, "k": keys, "v": keys, "dout": rows, "out": rows, "lse": lse, "lse_rest": lse}
        given = [tensors.get(name, torch.zeros(bias)) for name in found.input_names]
        (gradient,) = found(given, outputs=(torch.full(bias, torch.nan),))
        assert torch.equal(gradient, torch.zeros(bias))
